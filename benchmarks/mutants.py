"""Small faults in the files of a room, and which of them its tests find.

    python benchmarks/mutants.py --room llamarl/tickets --tests tests/unit/test_l*.py [options]

A mutant is a file with one change: a comparison turned or its boundary moved, + for -, `and` for
`or`, a number one more or one less, a `not` dropped, a None returned. A seeded sample of them is
written into a temporary copy of the checkout, one at a time, and the tests run there up to the
first that fails. A mutant is killed if one fails or does not end in time, and alive otherwise.

--against: the mutants of an earlier --json in place of a sample, by function and change, wherever
the function is now. The exit status is 1 if one that was killed then is alive.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from running import ROOT

IMPORTED_ONCE = ("torch", "transformers", "hypothesis", "pytest")  # for all runs
NOT_COPIED = (".git", ".venv*", "runs", "__pycache__", ".hypothesis", ".*_cache")
OPTIONS = "-x -q -n 0 -p no:randomly -p no:cacheprovider --hypothesis-seed=0".split()
MOST_S = 1800.0  # of the tests without a mutant
SLOWER, START_S = 3.0, 30.0  # a mutant's tests may take so many times as long and so much more
ALIVE = "alive"


def both_ways(*pairs: tuple[type, type]) -> dict[type, type]:
    """Return what becomes of each of a pair: the other."""
    return dict(pairs) | {second: first for first, second in pairs}


BOUNDARY = both_ways((ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
TURNED = both_ways((ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.NotEq))
TURNED |= both_ways((ast.Is, ast.IsNot), (ast.In, ast.NotIn))
SIGN = both_ways((ast.Add, ast.Sub))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one change.

    key: its name, in other commits too: the function with its classes, the operator, the expression
    before and after, and a number where there are several.
    """

    file: Path  # in the checkout
    line: int
    key: str
    source: str  # the whole file


def changes(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    """Yield the changes of a node: operator, field, and the field's new value."""
    match node:
        case ast.Compare(ops=[first, *others]):
            for operator, swaps in (("comparison turned", TURNED), ("boundary moved", BOUNDARY)):
                if type(first) in swaps:
                    yield operator, "ops", [swaps[type(first)](), *others]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SIGN:
            yield "sign turned", "op", SIGN[type(op)]()
        case ast.BoolOp(op=op):
            yield "and, or", "op", ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "one more", "value", value + 1
            yield "one less", "value", value - 1
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            # Twice not is as true as the operand.
            yield "not dropped", "operand", ast.UnaryOp(op=ast.Not(), operand=operand)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "None returned", "value", ast.Constant(value=None)


def mutants_of(path: Path, seen: Counter[str]) -> Iterator[Mutant]:
    """Yield all mutants of a file. seen: of the files before it, by function and change."""
    tree = ast.parse(path.read_text())

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            function = f"{function}.{node.name}".lstrip(".")
        for operator, field, value in changes(node):
            old, before = getattr(node, field), ast.unparse(node)
            setattr(node, field, value)
            name = f"{function}, {operator}: {before} -> {ast.unparse(node)}"
            seen[name] += 1
            yield Mutant(
                file=path.relative_to(ROOT),
                line=node.lineno,
                key=f"{name} ({seen[name]})",
                source=ast.unparse(tree),
            )
            setattr(node, field, old)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, "")


def _tests_here(copy: Path, tests: list[str]) -> None:
    """Run tests in this process, which ends with their status."""
    os.setsid()  # so that what they start ends with them
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sys.exit(int(importlib.import_module("pytest").main([*OPTIONS, *tests])))


def run_tests(copy: Path, tests: list[str], timeout_s: float) -> str:
    """Run tests in a copy of the checkout, and return what became of its mutant."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_tests_here, args=(copy, tests))
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # it has what failed before
    if status is None:
        return "timed out"
    return "killed" if status else ALIVE


def main() -> int:
    """Try the mutants, print which are alive, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--room", nargs="+", required=True, help="directories or files")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    every: list[Mutant] = []
    seen: Counter[str] = Counter()
    for room in args.room:
        for file in sorted(Path(ROOT, room).rglob("*.py")) or [Path(ROOT, room)]:
            every += mutants_of(file, seen)
    before: dict[str, str] = {}
    if args.against:
        before = {one["key"]: one["result"] for one in json.loads(args.against.read_text())}
        chosen = [mutant for mutant in every if mutant.key in before]
        print(f"{len(before) - len(chosen)} of {len(before)} mutants have no place any more")
    else:
        chosen = random.Random(args.seed).sample(every, min(args.number, len(every)))
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    tests = [str(Path(test).resolve().relative_to(ROOT)) for test in args.tests]
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        began = time.monotonic()
        if run_tests(copy, tests, MOST_S) != ALIVE:
            sys.exit(f"the tests do not pass in {MOST_S:.0f} s without a mutant")
        tests_s = time.monotonic() - began
        print(f"{len(chosen)} of {len(every)} mutants; tests take {tests_s:.0f} s", flush=True)
        for mutant in chosen:
            target = copy / mutant.file
            bytecode = Path(importlib.util.cache_from_source(str(target)))
            whole = target.read_text()
            target.write_text(mutant.source)
            bytecode.unlink(missing_ok=True)  # it passes for that of a source of the same second
            result = run_tests(copy, tests, SLOWER * tests_s + START_S)
            bytecode.unlink(missing_ok=True)
            target.write_text(whole)
            found.append({"key": mutant.key, "file": str(mutant.file), "result": result})
            print(f"{result}  {mutant.file}:{mutant.line} {mutant.key}", flush=True)
    print(dict(Counter(one["result"] for one in found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    survivors = {one["key"] for one in found if one["result"] == ALIVE}
    revived = [key for key in survivors if before.get(key, ALIVE) != ALIVE]
    for key in revived:
        print(f"was killed, and is alive: {key}")
    return 1 if revived else 0


if __name__ == "__main__":
    sys.exit(main())
