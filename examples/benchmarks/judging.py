"""What `sm-nanogpt eval` finds of what was planted, whether its interval holds, what it costs.

Examples:
  python examples/benchmarks/judging.py --text input.txt
  python examples/benchmarks/judging.py --text input.txt --ours='--preset laptop'

A model learns nine tenths of the text (--preset quick, or --ours), in which canaries are planted:
lines with 7 random digits, 0, 1, 4, 16, and 64 times. The last tenth is cut into 200 documents. In
each of --rounds draws, 20 of them become ROT13, Latin, or the same words in random order, and those
20 should be the worst 20 of the 200. A document's loss does not depend on the others, so one
evaluation of all of them serves all draws, and also the 500 resamples whose intervals should cover
the loss of the whole. Texts with 0, 5, and 50 % of the training text have that overlap.

The cost is that of 1 MB and the `laptop` model, trained for a few steps, which changes no cost. CPU
seconds are those of the judge and of its worker processes, which Linux alone tells.
"""

from __future__ import annotations

import codecs
import json
import random
import shlex
import string
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
from measure import CLI, ROOT, Failed, Process, Report, as_arguments, started
from trainers import SHAPES

sys.path.insert(0, str(ROOT))
from launcher.judge.evaluation import Passage, margin, total

TIMES = (0, 1, 4, 16, 64)  # that a canary is planted
FALSE_ALARM = 14.0  # bits
KINDS = 3  # of strange documents
OVERLAPS = (0.0, 0.05, 0.5)
RESAMPLES, TAKEN = 500, 100  # documents of a resample
PLANTED, OF = 20, 200
# Caesar, De Bello Gallico, the first chapters.
LATIN = """\
Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui
ipsorum lingua Celtae, nostra Galli appellantur. Hi omnes lingua, institutis, legibus inter se
differunt. Gallos ab Aquitanis Garumna flumen, a Belgis Matrona et Sequana dividit. Horum omnium
fortissimi sunt Belgae, propterea quod a cultu atque humanitate provinciae longissime absunt,
minimeque ad eos mercatores saepe commeant atque ea quae ad effeminandos animos pertinent
important, proximique sunt Germanis, qui trans Rhenum incolunt, quibuscum continenter bellum
gerunt. Qua de causa Helvetii quoque reliquos Gallos virtute praecedunt, quod fere cotidianis
proeliis cum Germanis contendunt, cum aut suis finibus eos prohibent aut ipsi in eorum finibus
bellum gerunt. Eorum una pars, quam Gallos obtinere dictum est, initium capit a flumine Rhodano,
continetur Garumna flumine, Oceano, finibus Belgarum, attingit etiam ab Sequanis et Helvetiis
flumen Rhenum, vergit ad septentriones. Belgae ab extremis Galliae finibus oriuntur, pertinent ad
inferiorem partem fluminis Rheni, spectant in septentrionem et orientem solem. Aquitania a Garumna
flumine ad Pyrenaeos montes et eam partem Oceani quae est ad Hispaniam pertinet; spectat inter
occasum solis et septentriones. Apud Helvetios longe nobilissimus fuit et ditissimus Orgetorix. Is
regni cupiditate inductus coniurationem nobilitatis fecit et civitati persuasit ut de finibus suis
cum omnibus copiis exirent: perfacile esse, cum virtute omnibus praestarent, totius Galliae
imperio potiri.
"""
# The command with the CPU seconds of each part of it, on stderr: of the judge, and of its workers.
PARTS = """
import json, os, sys, time
from pathlib import Path
from launcher.cli import run
from launcher.judge import anchors, evaluate, texts, worker

workers, spent, stack = [], {}, []

def clocks():
    theirs = 0.0
    for each in workers:
        try:
            fields = Path(f"/proc/{each.program.pid}/stat").read_text().rpartition(")")[2].split()
            each.cpu = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError):
            pass
        theirs += getattr(each, "cpu", 0.0)
    return time.process_time(), theirs, time.perf_counter()

def count(part, function):
    def counted(*args, **options):
        if part == "start of workers":
            workers.append(args[0])
        begin = clocks()
        stack.append([0.0, 0.0, 0.0])
        try:
            return function(*args, **options)
        finally:
            whole = [b - a for a, b in zip(begin, clocks())]
            inner = stack.pop()
            own = [w - i for w, i in zip(whole, inner)]
            spent[part] = [a + b for a, b in zip(spent.get(part, [0, 0, 0]), own)]
            for outer in stack[-1:]:
                outer[:] = [a + b for a, b in zip(outer, whole)]
    return counted

for owner, name, part in (
    (evaluate, "check_causal", "causality"), (evaluate, "losses", "scoring"),
    (worker.Worker, "sample", "samples"),
    (anchors, "xz", "xz"), (anchors, "ngram", "5-gram"), (anchors, "overlap", "overlap"),
    (anchors, "longest_run", "longest run"), (worker.Worker, "__init__", "start of workers"),
    (evaluate, "encode", "reading and encoding"), (texts, "read_texts", "reading and encoding"),
    (evaluate, "training_of", "reading and encoding"),
):
    setattr(owner, name, count(part, getattr(owner, name)))
code = count("the rest", run)(*[sys.argv[1:]])
sys.stderr.write("parts: " + json.dumps(spent) + "\\n")
sys.exit(code)
"""


def benchmark(args: Namespace, scratch: Path) -> Report:
    options, costly = args.ours or {"preset": "quick"}, {"preset": "laptop", "max_steps": 20}
    text, samples = args.text.read_bytes().decode(), RESAMPLES
    if args.quick:
        options = SHAPES["smoke"] | {"max_steps": 20, "sample_length": 10} | args.ours
        text, costly, samples = text[:60_000], options, 20
    learned, held = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    chance, judge = random.Random(args.seed), Judge(scratch)
    canaries = {n: [canary(chance) for _ in range(5 if n else 100)] for n in TIMES}
    # The last line has all characters of what is judged.
    known = "".join(sorted({*text, *LATIN, *string.ascii_letters, *string.digits}))
    lines = planted(learned, canaries, chance)
    job = judge.trained("\n".join([*lines, known, ""]), options)
    size = len(held) // OF
    documents = [held[n * size : (n + 1) * size] for n in range(OF)]
    strangers = [[strange(each, kind, chance) for each in documents] for kind in range(KINDS)]
    texts = [*documents, *(each for some in strangers for each in some)]
    secrets = judge.file("\n".join(line for some in canaries.values() for line in some))
    records = "\n".join(json.dumps({"text": each}) for each in texts)
    found = judge.judged(job, judge.file(records, ".jsonl"), "--find", str(secrets))
    in_order = sorted(found["documents"], key=lambda each: int(each["place"].rpartition(":")[2]))
    parts = [Passage(**each) for each in in_order]
    report = Report(
        [
            {
                "": f"{PLANTED} strange documents of {OF}: those among the worst {PLANTED}",
                "found": counted([hits(parts, chance) for _ in range(args.rounds)]),
                "goal": "19 or more",
            },
            {
                "": f"95 % intervals of {TAKEN} documents that cover the loss of all {OF}",
                "found": f"{cover(parts[:OF], samples, chance):.1%} of {samples}",
                "goal": "90 to 98 %",
            },
        ]
    )
    bits = {each["line"]: each["exposure"] for each in found["canaries"]}
    for n, some in canaries.items():
        row = {"": f"exposure of a canary that was planted {n} times, bits"}
        row["found"] = measure.spread([bits[line] for line in some], 1)
        report.rows.append(row if n else {**row, "goal": f"none of 100 has {FALSE_ALARM:g}"})
    trained = "\n".join(lines[: len(lines) * 8 // 10])  # the last tenth is for validation
    for share in OVERLAPS:
        mixed = judge.file(overlapping(trained, strangers[1], share, chance))
        row = {"": f"overlap of {share:.0%}", "found": f"{judge.judged(job, mixed)['overlap']:.2%}"}
        report.rows.append({**row, "goal": "within 0.5 points" if share else "under 0.1 %"})
    report.rows += judge.cost(judge.trained(text, costly), judge.file(text[: 10**6]))
    report.findings["our words"] = " ".join(as_arguments(options))
    report.findings["words of the cost"] = " ".join(as_arguments(costly))
    return report


def canary(chance: random.Random) -> str:
    name = "".join(chance.choices("abcdefghiklmnoprstuvwy", k=6)).capitalize()
    return f"The key of {name} is {{{chance.randrange(10**7):07}}}."


def planted(text: str, canaries: Mapping[int, Sequence[str]], chance: random.Random) -> list[str]:
    """The lines of a text, and at random places the canaries, as often as the keys say."""
    lines = text.splitlines()
    for line in (line for n, some in canaries.items() for line in [*some] * n):
        lines.insert(chance.randrange(len(lines)), line.replace("{", "").replace("}", ""))
    return lines


def strange(text: str, kind: int, chance: random.Random) -> str:
    """ROT13, the same words in random order, or Latin of the same length."""
    if kind == 0:
        return codecs.encode(text, "rot13")
    if kind == 1:
        words = text.split()
        return " ".join(chance.sample(words, len(words)))
    begin = chance.randrange(len(LATIN))
    return (LATIN * (2 + len(text) // len(LATIN)))[begin : begin + len(text)]


def hits(parts: Sequence[Passage], chance: random.Random) -> int:
    """How many of PLANTED documents that become strange are among the worst PLANTED of OF."""
    drawn = {n: chance.randrange(1, KINDS + 1) for n in chance.sample(range(OF), PLANTED)}
    bits = [parts[n + OF * drawn.get(n, 0)].bits_per_byte for n in range(OF)]
    worst = sorted(range(OF), key=bits.__getitem__)[-PLANTED:]
    return len(drawn.keys() & worst)


def counted(numbers: Sequence[int]) -> str:
    return ", ".join(f"{n} in {times} draws" for n, times in sorted(Counter(numbers).items()))


def cover(parts: Sequence[Passage], samples: int, chance: random.Random) -> float:
    """The share of resamples whose interval holds the loss of the whole."""
    truth, covered = total(parts).bits_per_byte, 0
    for _ in range(samples):
        some = chance.choices(parts, k=TAKEN)
        covered += abs(total(some).bits_per_byte - truth) <= (margin(some) or 0.0)
    return covered / samples


def overlapping(learned: str, others: Sequence[str], share: float, chance: random.Random) -> str:
    """Texts of which a share is exchanged for parts of the text that was learned."""
    size = len(others[0])
    known = set(chance.sample(range(len(others)), round(share * len(others))))
    begins = (chance.randrange(len(learned) - size) for _ in others)
    parts = zip(others, begins, strict=True)
    return "".join(
        learned[begin : begin + size] if n in known else other
        for n, (other, begin) in enumerate(parts)
    )


class Judge:
    """A home with jobs in a directory, and what `eval` says of them."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.env, self.files = scratch, {"SM_NANOGPT_HOME": str(scratch / "home")}, 0

    def file(self, text: str, suffix: str = ".txt") -> Path:
        self.files += 1
        path = self.scratch / f"{self.files}{suffix}"
        path.write_bytes(text.encode())
        return path

    def printed(self, *command: str) -> str:
        """The stdout of a command; its stderr is in a file."""
        with (self.scratch / "stderr").open("w+") as log:
            process = Process(command, env=self.env)
            with started(process, stdout=subprocess.PIPE, stderr=log, text=True) as popen:
                out, _ = popen.communicate()
            if popen.returncode:
                log.seek(0)
                raise Failed(f"{shlex.join(command)}: {log.read().splitlines()[-1:]}")
        return str(out)

    def trained(self, text: str, options: Mapping[str, Any]) -> str:
        """The id of a job that has learned a text."""
        measure.note(f"training: {' '.join(as_arguments(options))}")
        preset = [f"--preset={options['preset']}"] if "preset" in options else []
        sets = [f"--set={name}={value}" for name, value in options.items() if name != "preset"]
        launch = ["launch", "--instance", "local", "--data", str(self.file(text))]
        return self.printed(*CLI, *launch, *preset, *sets).strip()

    def judged(self, job: str, text: Path, *more: str) -> dict[str, Any]:
        measure.note(f"eval of {text.name}, {text.stat().st_size:,} bytes")
        (found,) = json.loads(self.printed(*CLI, "eval", job, str(text), "--json", *more))
        return dict(found)

    def cost(self, job: str, text: Path) -> list[dict[str, Any]]:
        """The seconds of each part of an evaluation."""
        measure.note(f"cost of {text.stat().st_size:,} bytes")
        self.printed(sys.executable, "-c", PARTS, "eval", job, str(text))
        log = (self.scratch / "stderr").read_text()
        parts = json.loads(log.rpartition("parts: ")[2])
        parts["all parts"] = [sum(column) for column in zip(*parts.values(), strict=True)]
        names = ("CPU s, judge", "CPU s, workers", "seconds")
        return [
            {"": part, **dict(zip(names, ([round(x, 1)] for x in values), strict=True))}
            for part, values in parts.items()
        ]


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=10, nanogpt=False)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default 1)")
    measure.run(parser, benchmark)
