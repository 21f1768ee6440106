#!/usr/bin/env python3
"""Races loquat against other engines on this machine, in turn, and writes a table, all samples and a plot. See README.md."""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import peers
import report
from cells import GROUPS, Candle, Llama, Loquat, cells, measured
from peers import say


def words(text):
    return [word for word in text.split(",") if word]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="fetch and build the peers, and loquat's examples")
    run = commands.add_parser("run", help="race")
    for sub in [build, run]:
        sub.add_argument("--peers", type=words, default=["llama.cpp"], help="of llama.cpp, candle")
        sub.add_argument("--build", choices=list(peers.KINDS), default="native", help="kind of llama.cpp build")
        sub.add_argument("--jobs", type=int, default=os.cpu_count(), help="of a build at a time")
        sub.add_argument("--llama-bin", type=Path, help="folder with llama.cpp's tools, in place of a build of our own")
        sub.add_argument("--candle", type=Path, help="race-candle, in place of a build of our own")
        sub.add_argument("--loquat-bin", type=Path, help="folder with loquat's release examples, in place of a build of our own")
    run.add_argument("--only", type=words, default=GROUPS, help="groups of cells")
    run.add_argument("--match", default="", help="a regular expression: cells whose names it finds")
    run.add_argument("--formats", type=words, default=["Q4_1"], help="of " + ", ".join(peers.FORMATS))
    run.add_argument("--model", type=Path, help="a GGUF file, in place of SmolLM2")
    run.add_argument("--threads", type=lambda text: [int(n) for n in words(text)], default=[1, 2], help="numbers of threads")
    run.add_argument("--rounds", type=int, default=5, help="samples of each engine and cell, the engines in turn")
    run.add_argument("--tier", help="loquat's kernels: scalar, avx2, avx512")
    run.add_argument("--out", type=Path, help="what is written, without its ending (default: benches/results/DATE-PROCESSOR)")
    run.add_argument("--note", default="", help="a line for the head of the table")
    args = parser.parse_args()
    for option, found, known in [("--peers", args.peers, ["llama.cpp", "candle"]),
                                 ("--only", getattr(args, "only", []), GROUPS),
                                 ("--formats", getattr(args, "formats", []), peers.FORMATS)]:
        for word in found:
            if word not in known:
                parser.error(f"{option}: expected some of {', '.join(known)}, found {word!r}")
    return args


def engines(args):
    """loquat first, and the folder of llama.cpp's tools."""
    loquat = Loquat(args.loquat_bin or peers.build_loquat(), getattr(args, "tier", None))
    llama_bin = args.llama_bin
    if not llama_bin and ("llama.cpp" in args.peers or getattr(args, "formats", []) != ["Q4_1"]):
        llama_bin = peers.build_llama(args.build, args.jobs)
    made = [loquat]
    if "llama.cpp" in args.peers:
        made.append(Llama(llama_bin))
    if "candle" in args.peers:
        made.append(Candle(args.candle or peers.build_candle(args.jobs)))
    return made, llama_bin


def output(*command):
    """The first line of what a program says, or nothing where there is no such program."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, cwd=peers.REPOSITORY).stdout
    except OSError:
        return None
    return text.strip().splitlines()[0] if text.strip() else None


def machine():
    """What the system says of itself."""
    info = {"system": f"{platform.system()} {platform.release()}", "architecture": platform.machine(), "cores": os.cpu_count()}
    try:
        text = Path("/proc/cpuinfo").read_text()
        found = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text, re.MULTILINE))
        flags = set(found.get("flags", "").split())
        telling = r"avx|fma|f16c|amx|bmi2|vnni|sse4"
        info |= {"processor": found.get("model name"), "family": found.get("cpu family"), "model": found.get("model"),
                 "cache": found.get("cache size"), "flags": sorted(f for f in flags if re.search(telling, f))}
        info["memory_kib"] = int(re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
    except OSError:
        info["processor"] = platform.processor()
    return info


def without_paths(words):
    """The command line without folders, which say nothing on another machine."""
    said = []
    for before, word in zip(["", *words], words):
        name, _, value = word.partition("=")
        paths = ["--llama-bin", "--loquat-bin", "--candle", "--model", "--out"]
        said.append(Path(word).name if before in paths else f"{name}={Path(value).name}" if name in paths and value else word)
    return said


def load():
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def race(args):
    racers, llama_bin = engines(args)
    chosen = [c for c in cells(args.only, args.threads) if re.search(args.match, c.name)]
    models = {args.model.name: args.model.resolve()} if args.model else {f: peers.model(f, llama_bin) for f in args.formats}
    if not chosen:
        sys.exit(f"--only, --match: expected at least one cell, found none of {args.match!r}")
    results = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "note": args.note,
        "machine": machine(),
        "rounds": args.rounds,
        "command": " ".join(["race.py", *without_paths(sys.argv[1:])]),
        "versions": {
            "loquat": output("git", "describe", "--always", "--dirty"),
            "rustc": output("rustc", "--version"),
            "cc": output("cc", "--version"),
        },
        "models": {name: {"bytes": path.stat().st_size, "sha256": peers.sha256(path)} for name, path in models.items()},
        "cells": [],
    }
    slug = re.sub(r"[^a-z0-9]+", "-", (results["machine"].get("processor") or "machine").lower()).strip("-")
    out = args.out or peers.REPOSITORY / "benches" / "results" / f"{results['date'][:10]}-{slug}"
    say(f"load average {load()}, {len(chosen)} cells, {len(models)} models, {args.rounds} rounds")
    for name, path in models.items():
        for cell in chosen:
            results["cells"].append(one(racers, cell, name, path, args.rounds))
            for engine in racers[1:]:
                version = {"llama.cpp": f"{peers.PACKAGE} {peers.VERSION}, {args.build}", "candle": "candle 0.11.1"}[engine.name]
                known = getattr(engine, "version", None)
                results["versions"][engine.name] = f"{version}, {known}" if known else version
            # Whatever ends a long race early, what it found is there.
            written = report.write(results, out)
    say("written: " + ", ".join(map(str, written)))


def one(racers, cell, model, path, rounds):
    """All samples of a cell: in each round every engine in every variant, one after the other."""
    samples, commands, loads = {}, {}, []
    for _ in range(rounds):
        loads.append(load())
        for engine in racers:
            for variant in engine.variants(cell):
                value, command = measured(engine, cell, path, variant)
                key = engine.name if variant == "default" else f"{engine.name}, {variant}"
                samples.setdefault(key, []).append(value)
                # The folder says nothing to anybody else.
                commands[key] = " ".join([Path(command[0]).name, *command[1:]]).replace(str(path), Path(path).name)
    found = {"group": cell.group, "n": cell.n, "name": cell.name, "threads": cell.threads, "model": model, "unit": cell.unit,
             "more_is_better": cell.more_is_better, "samples": samples, "commands": commands, "load_average": loads}
    say("  " + report.line(found))
    return found


def main():
    args = arguments()
    if args.command == "build":
        engines(args)
    else:
        race(args)


if __name__ == "__main__":
    main()
