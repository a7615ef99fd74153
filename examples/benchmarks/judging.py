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
from sm_nanogpt.launcher.judge.evaluation import Passage, margin_of_bits, total

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
from sm_nanogpt.launcher.cli import run
from sm_nanogpt.launcher.judge import anchors, evaluate, texts, worker

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
    (evaluate, "check_causal", "causality"), (evaluate, "losses_of_documents", "scoring"),
    (worker.Worker, "sample", "samples"),
    (anchors, "xz_bits_per_byte", "xz"), (anchors, "ngram_bits_per_byte", "5-gram"),
    (anchors, "shared_fraction", "overlap"),
    (anchors, "longest_copy", "longest run"), (worker.Worker, "__init__", "start of workers"),
    (evaluate, "encode_known_characters", "reading and encoding"),
    (texts, "read_texts", "reading and encoding"),
    (evaluate, "training_of", "reading and encoding"),
):
    setattr(owner, name, count(part, getattr(owner, name)))
code = count("the rest", run)(*[sys.argv[1:]])
sys.stderr.write("parts: " + json.dumps(spent) + "\\n")
sys.exit(code)
"""


def benchmark(args: Namespace, scratch: Path) -> Report:
    options = args.ours or {"preset": "quick"}
    costly_options: dict[str, Any] = {"preset": "laptop", "max_steps": 20}
    text = args.text.read_bytes().decode()
    samples = RESAMPLES
    overlaps: Sequence[float] = OVERLAPS
    if args.quick:
        options = SHAPES["smoke"] | {"max_steps": 20, "sample_length": 10} | args.ours
        costly_options = options
        text = text[:20_000]
        samples = 20
        overlaps = OVERLAPS[-1:]
    cut = len(text) * 9 // 10
    training_text, judged_text = text[:cut], text[cut:]
    chance = random.Random(args.seed)
    judge = Judge(scratch)

    # A model that has learned the canaries.
    canaries: dict[int, list[str]] = {}
    for times in TIMES:
        n = 5 if times else 100
        canaries[times] = [canary(chance) for _ in range(n)]
    lines = planted(training_text, canaries, chance)
    # The last line has all characters of what is judged.
    alphabet = "".join(sorted({*text, *LATIN, *string.ascii_letters, *string.digits}))
    job = judge.trained("\n".join([*lines, alphabet, ""]), options)

    # Documents, and after them the same number of each strange kind, in one evaluation.
    size = len(judged_text) // OF
    documents = [judged_text[n * size : (n + 1) * size] for n in range(OF)]
    strange_documents = []
    for kind in range(KINDS):
        strange_documents.append([strange(document, kind, chance) for document in documents])
    records = []
    for texts in (documents, *strange_documents):
        records += [json.dumps({"text": document}) for document in texts]
    records_file = judge.file("\n".join(records), ".jsonl")
    canary_lines = [line for of_times in canaries.values() for line in of_times]
    canary_file = judge.file("\n".join(canary_lines))
    evaluation = judge.judged(job, records_file, "--find", str(canary_file))
    in_order = sorted(evaluation["documents"], key=line_number)
    parts = [Passage(**document) for document in in_order]

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
    bits = {canary["line"]: canary["exposure"] for canary in evaluation["canaries"]}
    for times, of_times in canaries.items():
        row = {"": f"exposure of a canary that was planted {times} times, bits"}
        row["found"] = measure.spread([bits[line] for line in of_times], 1)
        if times == 0:
            row["goal"] = f"none of 100 has {FALSE_ALARM:g}"
        report.rows.append(row)

    trained_text = "\n".join(lines[: len(lines) * 8 // 10])  # the last tenth is for validation
    for share in overlaps:
        mixed = overlapping(trained_text, strange_documents[1], share, chance)
        overlap = judge.judged(job, judge.file(mixed))["overlap"]
        row = {"": f"overlap of {share:.0%}", "found": f"{overlap:.2%}"}
        row["goal"] = "within 0.5 points" if share else "under 0.1 %"
        report.rows.append(row)

    costly_job = job if args.quick else judge.trained(text, costly_options)
    report.rows += judge.cost(costly_job, judge.file(text[: 10**6]))
    report.findings["our options"] = " ".join(as_arguments(options))
    report.findings["options of the cost"] = " ".join(as_arguments(costly_options))
    return report


def line_number(document: Mapping[str, Any]) -> int:
    """The number of a document's line, which ends its place."""
    return int(document["place"].rpartition(":")[2])


def canary(chance: random.Random) -> str:
    name = "".join(chance.choices("abcdefghiklmnoprstuvwy", k=6)).capitalize()
    return f"The key of {name} is {{{chance.randrange(10**7):07}}}."


def planted(text: str, canaries: Mapping[int, Sequence[str]], chance: random.Random) -> list[str]:
    """The lines of a text, and at random places the canaries, as often as the keys say."""
    lines = text.splitlines()
    for times, of_times in canaries.items():
        for _ in range(times):
            for line in of_times:
                bare_line = line.replace("{", "").replace("}", "")
                lines.insert(chance.randrange(len(lines)), bare_line)
    return lines


def strange(text: str, kind: int, chance: random.Random) -> str:
    """ROT13, the same words in random order, or Latin of the same length."""
    if kind == 0:
        return codecs.encode(text, "rot13")
    if kind == 1:
        words_of_text = text.split()
        return " ".join(chance.sample(words_of_text, len(words_of_text)))
    begin = chance.randrange(len(LATIN))
    endless = LATIN * (2 + len(text) // len(LATIN))
    return endless[begin : begin + len(text)]


def hits(parts: Sequence[Passage], chance: random.Random) -> int:
    """How many of PLANTED documents that become strange are among the worst PLANTED of OF."""
    kinds = [0] * OF  # 0: a document stays as it is
    strangers = chance.sample(range(OF), PLANTED)
    for n in strangers:
        kinds[n] = chance.randrange(1, KINDS + 1)
    bits = [parts[n + OF * kinds[n]].bits_per_byte for n in range(OF)]
    worst = sorted(range(OF), key=bits.__getitem__)[-PLANTED:]
    return len(set(strangers) & set(worst))


def counted(numbers: Sequence[int]) -> str:
    return ", ".join(f"{n} in {times} draws" for n, times in sorted(Counter(numbers).items()))


def cover(parts: Sequence[Passage], samples: int, chance: random.Random) -> float:
    """The share of resamples whose interval holds the loss of the whole."""
    truth = total(parts).bits_per_byte
    n_covered = 0
    for _ in range(samples):
        sample = chance.choices(parts, k=TAKEN)
        error = abs(total(sample).bits_per_byte - truth)
        if error <= (margin_of_bits(sample) or 0.0):
            n_covered += 1
    return n_covered / samples


def overlapping(learned: str, others: Sequence[str], share: float, chance: random.Random) -> str:
    """Texts of which a share is exchanged for parts of the text that was learned."""
    size = len(others[0])
    exchanged = set(chance.sample(range(len(others)), round(share * len(others))))
    texts = []
    for n, other in enumerate(others):
        begin = chance.randrange(len(learned) - size)
        texts.append(learned[begin : begin + size] if n in exchanged else other)
    return "".join(texts)


class Judge:
    """A home with jobs in a directory, and what `eval` says of them."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.env = {"SM_NANOGPT_HOME": str(scratch / "home")}
        self.n_files = 0

    def file(self, text: str, suffix: str = ".txt") -> Path:
        self.n_files += 1
        path = self.scratch / f"{self.n_files}{suffix}"
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
        command = [*CLI, "launch", "--instance", "local", "--data", str(self.file(text))]
        for name, value in options.items():
            command.append(f"--preset={value}" if name == "preset" else f"--set={name}={value}")
        return self.printed(*command).strip()

    def judged(self, job: str, text: Path, *options: str) -> dict[str, Any]:
        measure.note(f"eval of {text.name}, {text.stat().st_size:,} bytes")
        command = [*CLI, "eval", job, str(text), "--json", *options]
        (evaluation,) = json.loads(self.printed(*command))
        return dict(evaluation)

    def cost(self, job: str, text: Path) -> list[dict[str, Any]]:
        """The seconds of each part of an evaluation."""
        measure.note(f"cost of {text.stat().st_size:,} bytes")
        self.printed(sys.executable, "-c", PARTS, "eval", job, str(text))
        log = (self.scratch / "stderr").read_text()
        parts = json.loads(log.rpartition("parts: ")[2])
        names = ("CPU s, judge", "CPU s, workers", "seconds")
        totals = [0.0] * len(names)
        rows = []
        for part, values in parts.items():
            totals = [a + b for a, b in zip(totals, values, strict=True)]
            rows.append(cost_row(part, names, values))
        rows.append(cost_row("all parts", names, totals))
        return rows


def cost_row(part: str, names: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"": part}
    for name, value in zip(names, values, strict=True):
        row[name] = [round(value, 1)]
    return row


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=10, nanogpt=False)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default 1)")
    measure.run(parser, benchmark)
