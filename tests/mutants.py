"""Draws random mutants of the product and counts how many of them the tests notice.

    .venv/bin/python tests/mutants.py                       # 8 mutants of each module, for days
    .venv/bin/python tests/mutants.py cost curve --count 20 --seed 3

A mutant is the module with one comparison, operator, condition, number or return value changed
(DeMillo, Lipton and Sayward, "Hints on Test Data Selection", 1978). It dies if a test fails. The
tests run in copies of the checkout, two at a time. Read each survivor, and either write the test
that is missing, or add it to EQUIVALENT with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 400  # for the tests of one mutant; one that hangs counts as dead

# The modules, and the tests that hold their rules, in any room. `make affected` reads it too.
MODULES = {
    "launcher/sagemaker/cost.py": "test_cost test_money test_prices",
    "launcher/sagemaker/request.py": "test_request test_estimator test_limits test_job",
    "launcher/sagemaker/account.py": "test_stack test_sagemaker test_sagemaker_errors",
    "launcher/sagemaker/backend.py": "test_request test_sagemaker test_sagemaker_resume",
    "launcher/sagemaker/caller.py": "test_finding test_sagemaker",
    "launcher/sagemaker/checks.py": "test_checks test_limits test_deploy",
    "launcher/sagemaker/estimator.py": "test_estimator",
    "launcher/sagemaker/rules.py": "test_limits test_request",
    "launcher/sagemaker/submission.py": "test_sagemaker test_sagemaker_errors",
    "launcher/sagemaker/stack.py": "test_stack test_deploy",
    "launcher/groups/ledger.py": "test_group_ledger test_sweeps test_money",
    "launcher/groups/money.py": "test_run test_group_ledger",
    "launcher/groups/plan.py": "test_group_ledger test_sweeps test_money",
    "launcher/groups/run.py": "test_run test_group_ledger test_sweeps",
    "launcher/groups/find.py": "test_sweeps test_group_ledger",
    "launcher/groups/ranking.py": "test_ranking test_sweeps",
    "launcher/groups/stop.py": "test_run test_sweeps test_finding",
    "launcher/groups/sweep.py": "test_sweeps test_values",
    "launcher/forecast/checks.py": "test_forecast",
    "launcher/forecast/clock.py": "test_forecast",
    "launcher/forecast/forecaster.py": "test_forecast",
    "launcher/forecast/forecasting.py": "test_forecast",
    "launcher/forecast/law.py": "test_forecast",
    "launcher/forecast/pilots.py": "test_forecast",
    "launcher/forecast/sizes.py": "test_forecast",
    "launcher/forecast/times.py": "test_forecast",
    "launcher/judge/anchors.py": "test_anchors",
    "launcher/judge/causality.py": "test_judge_cheats",
    "launcher/judge/evaluate.py": "test_evaluation test_worker test_evaluate",
    "launcher/judge/evaluation.py": "test_evaluation test_evaluate",
    "launcher/judge/measures.py": "test_worker test_evaluate",
    "launcher/judge/probes.py": "test_probes",
    "launcher/judge/rounding.py": "test_rounding",
    "launcher/judge/score.py": "test_evaluation test_judge_cheats test_score",
    "launcher/judge/texts.py": "test_probes test_score test_evaluate",
    "launcher/judge/worker.py": "test_worker test_cheats",
    "launcher/launching/draft.py": "test_fitting test_local_resume test_starting",
    "launcher/launching/fitting.py": "test_fitting",
    "launcher/launching/forecasts.py": "test_fitting test_forecast",
    "launcher/launching/launch.py": "test_chat_launches test_request",
    "launcher/launching/names.py": "test_run test_sweeps test_delete",
    "launcher/launching/resume.py": "test_resumed_jobs test_local_resume test_sagemaker_resume",
    "launcher/launching/sizing.py": "test_sizing",
    "launcher/launching/start.py": "test_starting",
    "launcher/launching/summary.py": "test_summary",
    "launcher/launching/texts.py": "test_sizing test_chat_launches test_starting",
    "launcher/local/backend.py": "test_local_backend test_local_resume test_gpus test_sizing",
    "launcher/local/confine.py": "test_confine",
    "launcher/local/gpus.py": "test_process test_confine",
    "launcher/local/landlock.py": "test_confine",
    "launcher/local/process.py": "test_process test_confine",
    "launcher/local/restrict.py": "test_confine",
    "launcher/local/runner.py": "test_local_backend",
    "launcher/local/syscalls.py": "test_confine",
    "launcher/local/runs.py": "test_process test_cheats",
    "launcher/sagemaker/deploy.py": "test_deploy",
    "launcher/sagemaker/description.py": "test_description",
    "launcher/sagemaker/logs.py": "test_logs",
    "launcher/aws.py": "test_aws test_sagemaker_errors",
    "launcher/errors.py": "test_show test_words test_values",
    "launcher/backends.py": "test_backends",
    "launcher/description.py": "test_cost test_money test_description",
    "launcher/doctor.py": "test_doctor",
    "launcher/finding.py": "test_finding test_library",
    "launcher/library.py": "test_library test_finding",
    "launcher/limits.py": "test_limits test_instances",
    "launcher/machines.py": "test_machines test_cores test_sizing test_request",
    "launcher/instances.py": "test_instances test_machines test_prices test_sizing",
    "launcher/settings.py": "test_settings test_documents test_cost",
    "launcher/job.py": "test_job test_cost test_request test_limits",
    "launcher/curve.py": "test_curve",
    "launcher/source.py": "test_job test_edited",
    "launcher/tracking.py": "test_library test_sagemaker test_finding",
    "launcher/values.py": "test_values test_limits test_fitting",
    "launcher/files/cache.py": "test_prices test_stack test_finding",
    "launcher/files/documents.py": "test_documents test_text_documents test_tokenizer",
    "launcher/files/ledger.py": "test_ledger",
    "launcher/files/local.py": "test_storage test_s3_servers",
    "launcher/locations.py": "test_storage test_moved test_corpus",
    "launcher/files/locks.py": "test_file_systems",
    "launcher/files/models.py": "test_starting",
    "launcher/files/moved.py": "test_moved",
    "launcher/files/progress.py": "test_show test_sources test_time_lines",
    "launcher/files/s3.py": "test_storage test_s3_servers",
    "launcher/files/scratch.py": "test_leftovers",
    "launcher/files/storage.py": "test_storage test_s3_servers",
    "launcher/models/chat.py": "test_chat test_chat_command",
    "launcher/models/encoder.py": "test_encoder test_tokenizer",
    "launcher/models/engine.py": "test_engine",
    "launcher/models/fetch.py": "test_artefacts test_documents",
    "launcher/models/load.py": "test_artefacts test_chat test_sample test_edited",
    "launcher/models/moments.py": "test_model_moments",
    "launcher/models/quantization.py": "test_quantization test_model_page",
    "launcher/models/sample.py": "test_sample",
    "launcher/models/weights.py": "test_engine test_quantization test_model_moments",
    "launcher/text/archives.py": "test_archives",
    "launcher/text/channels.py": "test_encodings test_tokens test_uploads",
    "launcher/text/run_corpus.py": "test_encodings test_tokens test_forecast",
    "launcher/text/chats.py": "test_chats test_records",
    "launcher/text/corpus.py": "test_corpus test_chats",
    "launcher/text/documents.py": "test_text_documents test_encodings test_chats test_formats",
    "launcher/text/encodings.py": "test_encodings test_formats",
    "launcher/text/exports.py": "test_exports",
    "launcher/text/files.py": "test_text_files test_formats test_sources",
    "launcher/text/first_text.py": "test_first_text",
    "launcher/text/formats.py": "test_formats test_sources",
    "launcher/text/ids.py": "test_forecast test_worker",
    "launcher/text/messengers.py": "test_messengers test_archives",
    "launcher/text/plain.py": "test_plain",
    "launcher/text/reading.py": "test_formats test_encodings test_whatsapp test_sources",
    "launcher/text/records.py": "test_records test_tables test_text_documents test_exports",
    "launcher/text/repeats.py": "test_repeats",
    "launcher/text/skipped.py": "test_chats",
    "launcher/text/sources.py": "test_sources",
    "launcher/text/store.py": "test_uploads test_corpus",
    "launcher/text/tables.py": "test_tables test_records test_formats",
    "launcher/text/talks.py": "test_messengers test_whatsapp",
    "launcher/text/threads.py": "test_tokenizer",
    "launcher/text/tokenizer.py": "test_tokenizer",
    "launcher/text/tokens.py": "test_tokens test_chats test_chat_launches",
    "launcher/text/unpacking.py": "test_formats test_text_documents test_records",
    "launcher/text/uploads.py": "test_uploads",
    "launcher/text/whatsapp.py": "test_whatsapp",
    "launcher/text/writing.py": "test_writing",
    "launcher/trying/budget.py": "test_budget",
    "launcher/trying/cloud.py": "test_cloud",
    "launcher/trying/code.py": "test_code",
    "launcher/trying/comparison.py": "test_search test_cheats",
    "launcher/trying/driver.py": "test_cloud",
    "launcher/trying/history.py": "test_history test_search",
    "launcher/trying/local.py": "test_cheats",
    "launcher/trying/planned.py": "test_cheats",
    "launcher/trying/progress.py": "test_progress",
    "launcher/trying/refusal.py": "test_search",
    "launcher/trying/rule.py": "test_rule",
    "launcher/trying/runs.py": "test_search",
    "launcher/trying/scoring.py": "test_cheats",
    "launcher/trying/search.py": "test_search test_cheats",
    "launcher/trying/start.py": "test_search",
    "launcher/views/api.py": "test_api test_play",
    "launcher/views/card.py": "test_library",
    "launcher/views/job_fields.py": "test_job_fields test_job_commands",
    "launcher/views/model_card.py": "test_play test_model_page",
    "launcher/views/model_page.py": "test_model_page test_play",
    "launcher/views/page.py": "test_report",
    "launcher/views/play.py": "test_play test_api",
    "launcher/views/report.py": "test_report",
    "launcher/views/saved_page.py": "test_model_page",
    "launcher/cli/__init__.py": "test_cli test_job_commands",
    "launcher/cli/account.py": "test_deploy test_stack test_doctor",
    "launcher/cli/chat.py": "test_chat_command test_escapes",
    "launcher/cli/delete.py": "test_delete",
    "launcher/cli/evaluate.py": "test_evaluate",
    "launcher/cli/folder.py": "test_cli test_edited",
    "launcher/cli/forecast.py": "test_forecast",
    "launcher/cli/jobs.py": "test_job_commands test_cli test_escapes",
    "launcher/cli/launch.py": "test_cli test_request test_chat_launches test_local_backend",
    "launcher/cli/models.py": "test_sample test_play",
    "launcher/cli/options.py": "test_cli test_completion",
    "launcher/cli/remedies.py": "test_cli test_show",
    "launcher/cli/search.py": "test_search test_cloud",
    "launcher/cli/show.py": "test_show test_escapes test_curve",
    "launcher/cli/sweep.py": "test_sweeps test_group_ledger",
    "launcher/cli/upload.py": "test_uploads test_formats test_text_files",
    "entry_point/causality.py": "test_causality",
    "entry_point/checkpoint.py": "test_files test_checkpoint test_trainer test_resume",
    "entry_point/safetensors_file.py": "test_files test_checkpoint test_starting",
    "entry_point/config.py": "test_config test_checkpoint test_sizing test_docs",
    "entry_point/command_line.py": "test_config test_checkpoint test_docs",
    "entry_point/container.py": "test_container",
    "entry_point/conversations.py": "test_conversations",
    "entry_point/cores.py": "test_cores",
    "entry_point/cuda_graphs.py": "test_compiling",
    "entry_point/data.py": "test_data test_tokens test_conversations",
    "entry_point/device.py": "test_device test_cores test_float16 test_compiling",
    "entry_point/distributed.py": "test_distributed test_ranks test_watchdog",
    "entry_point/errors.py": "test_errors test_config",
    "entry_point/faults.py": "test_output test_distributed",
    "entry_point/files.py": "test_files test_checkpoint test_file_systems",
    "entry_point/huggingface.py": "test_huggingface test_edited test_starting",
    "entry_point/kernels.py": "test_model test_generations test_conversations",
    "entry_point/metrics.py": "test_output test_validation test_trainer",
    "entry_point/model.py": "test_model test_huggingface",
    "entry_point/moments.py": "test_moments",
    "entry_point/passes.py": "test_trainer test_compiling test_generations test_ranks",
    "entry_point/presets.py": "test_config test_docs test_sizing",
    "entry_point/processes.py": "test_distributed test_watchdog test_resume",
    "entry_point/qwen3.py": "test_huggingface test_edited",
    "entry_point/report.py": "test_device test_output test_conversations",
    "entry_point/sizes.py": "test_sizing test_fitting",
    "entry_point/startup.py": "test_cli test_process",
    "entry_point/train.py": "test_container test_errors test_distributed test_output test_resume",
    "entry_point/waiting.py": "test_waiting",
    "entry_point/watchdog.py": "test_watchdog",
    "entry_point/text.py": "test_data test_text test_tokens test_starting test_conversations",
    "entry_point/optim.py": "test_optim test_trainer test_float16",
    "entry_point/resume.py": "test_trainer test_resume test_float16",
    "entry_point/trainer.py": "test_trainer test_resume test_output test_starting test_edited",
}
# Survivors that change nothing that a user or a test could see: the line, its change, the reason.
EQUIVALENT = {
    (
        "for index, nats in zip(indices, nats_of_batch, strict=True):",
        "True -> (False)",
    ): "each index has its losses",
    (
        "run_hashes = hashes(training[begin : begin + CHUNK_BYTES + length - 1], length)",
        "begin + CHUNK_BYTES + length - 1 -> (begin + CHUNK_BYTES + length + 1)",
    ): "the next chunk has these two runs too",
    (
        "for length in {longest // 8, longest // 3, longest // 2} - {0}:",
        "longest // 3 -> (longest * 3)",
    ): "the other lengths show the same",
    (
        "for window, counted in zip(windows, nats_of_windows, strict=True):",
        "True -> (False)",
    ): "each window has its losses",
    (
        "if not difference <= TOLERANCE:",
        "difference <= TOLERANCE -> (difference < TOLERANCE)",
    ): "no difference is exactly that",
    (
        "if spread > CHOSEN_SPREAD * stdev(usual_base_losses):",
        "spread > CHOSEN_SPREAD * stdev(usual_base_losses)"
        " -> (spread >= CHOSEN_SPREAD * stdev(usual_base_losses))",
    ): "no spread is exactly that",
    (
        "parts = {run[start : start + PART_BYTES] for start in range(len(run) - PART_BYTES + 1)}",
        "len(run) - PART_BYTES + 1 -> (len(run) - PART_BYTES - 1)",
    ): "two parts of 47 change no verdict",
    ('gzip.GzipFile(fileobj=archive, mode="wb", mtime=0) as file,', "0 -> (1)"): "any time will do",
    ("volume_size: int = 0  # GiB of disk per instance", "0 -> (1)"): "each backend gives one",
    ("n_validation_tokens = 0", "0 -> (1)"): "the part for validation may be a token shorter",
    (
        'LINES = (("raw", 1, 0.3), ("training", 1.25, 0.75), ("validation", 2.75, 1.0))  '
        "# width, opacity",
        "1.25 -> (2.25)",
    ): "a line may have any width",
}

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
WORDS = ("log", "logger", "warn", "warning", "info", "debug", "print", "sleep", "field", "Field")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    text: str  # of the line
    change: str
    source: str  # of the module

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    @property
    def is_equivalent(self) -> bool:
        return (self.text, self.change) in EQUIVALENT


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one thing changed, in each way there is."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARISONS:
        new.ops[0] = COMPARISONS[type(new.ops[0])]()
        yield new
    elif isinstance(new, ast.BinOp) and type(new.op) in OPERATORS:
        if not any(isinstance(part, (ast.Constant, ast.JoinedStr)) and not is_number(part)
                   for part in (new.left, new.right)):  # fmt: skip
            new.op = OPERATORS[type(new.op)]()
            yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and is_number(new):
        yield ast.Constant(new.value + 1)  # type: ignore[operator]
    elif isinstance(new, ast.Return) and ast.unparse(new) not in ("return", "return None"):
        yield ast.Return(ast.Constant(None))


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def fields(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """All fields that hold a node, outside of types, messages, logs and waits."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.JoinedStr):
            continue
        if isinstance(tree, ast.Dict) and len(tree.keys) > 10:  # a table of data
            continue
        if isinstance(tree, ast.Raise) or (
            isinstance(tree, ast.Call) and ast.unparse(tree.func).rpartition(".")[2] in WORDS
        ):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, ast.AST):
                yield tree, name, index if isinstance(value, list) else None
                yield from fields(node)


def mutants_of(file: str) -> list[Mutant]:
    source = (ROOT / file).read_text()
    tree = ast.parse(source)
    mutants = []
    for parent, name, index in list(fields(tree)):
        value = getattr(parent, name)
        node = value if index is None else value[index]
        for change in changes(node):
            lines = source.splitlines(keepends=True)
            starts = [0]
            for line in lines:
                starts.append(starts[-1] + len(line.encode()))
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(change))
            if not isinstance(node, ast.Return):
                new = f"({new})"
            raw = source.encode()
            changed = (raw[:begin] + new.encode() + raw[end:]).decode()
            text = lines[node.lineno - 1].strip()
            mutants.append(
                Mutant(file, node.lineno, text, f"{ast.unparse(node)} -> {new}", changed)
            )
    return mutants


def passes(checkout: Path, tests: str) -> bool:
    """Whether the tests pass in a copy of the checkout."""
    paths = {path.stem: str(path) for path in (checkout / "tests").rglob("test_*.py")}
    files = [paths[name] for name in tests.split()]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CI": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-r", "", "-W", "ignore", *files]
    command += ["-p", "no:cacheprovider", f"--basetemp={checkout.parent / 'tmp'}"]
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(LIMIT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="a part of the names of modules (default: all)")
    parser.add_argument("--count", type=int, default=8, help="of mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (default 2)")
    args = parser.parse_args()
    chosen = [m for m in MODULES if not args.names or any(name in m for name in args.names)]
    drawn = []
    for file in chosen:
        population = mutants_of(file)
        amount = min(args.count, len(population))
        drawn += random.Random(f"{args.seed} {file}").sample(population, amount)
    with tempfile.TemporaryDirectory() as temporary:
        free: SimpleQueue[Path] = SimpleQueue()
        for index in range(args.workers):
            checkout = Path(temporary, str(index), "checkout")
            ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "runs")
            # By its links, sm_nanogpt is the rooms that are changed, and no copy of them.
            shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
            free.put(checkout)

        def dies(mutant: Mutant) -> bool:
            checkout = free.get()
            file = checkout / mutant.file
            original = file.read_text()
            file.write_text(mutant.source)
            died = not passes(checkout, MODULES[mutant.file])
            file.write_text(original)
            free.put(checkout)
            known = " (equivalent)" * (not died and mutant.is_equivalent)
            print(f"{'died' if died else 'LIVES'}{known}  {mutant}", file=sys.stderr, flush=True)
            return died

        with ThreadPoolExecutor(args.workers) as pool:
            ended = dict(zip(drawn, pool.map(dies, drawn), strict=True))
    print("| module | mutants | died | equivalent | lived |\n|---|---|---|---|---|")
    total = [0, 0, 0, 0]
    for file in [*chosen, "all"]:
        rows = [(mutant, died) for mutant, died in ended.items() if file in ("all", mutant.file)]
        died = sum(died for _, died in rows)
        equivalent = sum(not died and mutant.is_equivalent for mutant, died in rows)
        total = [len(rows), died, equivalent, len(rows) - died - equivalent]
        print(f"| {file} | {' | '.join(map(str, total))} |")
    matter = total[0] - total[2]
    print(f"of {matter} that matter, {total[1]} died: {total[1] / max(1, matter):.0%}")


if __name__ == "__main__":
    main()
