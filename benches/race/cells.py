"""What is raced: cells, each a command for every engine that times the same thing, and what its output must say to count.

| group | loquat | llama.cpp |
| --- | --- | --- |
| decode | measure, G steps of one row behind a prompt of D | llama-bench -p 0 -n G -d D |
| prefill | measure, one prompt of P to its first token | llama-bench -p P -n 0 |
| batched | measure, G steps of B rows, each behind 128 tokens of its own | llama-batched-bench -npp 128 -ntg G -npl B |
| shared | measure --shared, G steps of B rows behind one prompt of 1,024 | the same with -npp 1024 -pps, with and without -kvu |
| busy | decode at depth 0 on 2 threads while another process keeps a core busy | the same |
| start | generate, from its start to its end after one token | llama-completion -n 1, without its warm-up |
| memory | the most memory of measure: a prompt of 128 and 64 steps | of llama-bench -p 128 -n 64 |

Speeds of batched and shared decode are tokens generated a second over all sequences; the prompts' time is not in them. Of llama.cpp each cell
runs with flash attention on and off; the better median counts. Both caches are F16.
"""

import json
import os
import subprocess
import sys
import time

from peers import tool

DEPTHS, PROMPTS, BATCHES, SHARED = [0, 1024, 4096], [128, 512, 2048], [2, 3, 8, 16, 32], [8, 16, 32]
STEPS, OWN, COMMON = {"decode": 64, "batched": 32, "shared": 32}, 128, 1024
GROUPS = ["decode", "prefill", "batched", "shared", "busy", "start", "memory"]
TEXT = "The quick brown fox jumps over the lazy dog. Once upon a time"


class Cell:
    """`group` and its number: a depth, a length, a batch."""

    def __init__(self, group, n=0, threads=1):
        self.group, self.n, self.threads = group, n, threads

    @property
    def name(self):
        return {
            "decode": f"decode at {self.n}",
            "prefill": f"prefill of {self.n}",
            "batched": f"decode of {self.n}, own prompts of {OWN}",
            "shared": f"decode of {self.n}, one prompt of {COMMON}",
            "busy": "decode at 0, another process busy",
            "start": "start to first token",
            "memory": "most memory",
        }[self.group]

    @property
    def unit(self):
        return {"start": "ms", "memory": "MiB"}.get(self.group, "tok/s")

    @property
    def more_is_better(self):
        return self.unit == "tok/s"


def cells(groups, threads):
    lists = {"decode": DEPTHS, "prefill": PROMPTS, "batched": BATCHES, "shared": SHARED}
    made = [Cell(group, n, t) for group in groups if group != "busy" for t in threads for n in lists.get(group, [0])]
    return made + [Cell("busy", 0, 2)] * ("busy" in groups)


class Ran:
    """A process that has ended: its output, seconds from start to end, and the most memory it had in MiB (nothing on Windows)."""

    def __init__(self, command, environment=None):
        # llama.cpp's tools tell on standard error how it went, and on standard output or there what they measured.
        start = time.perf_counter()
        child = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})
        with child.stdout:
            output = child.stdout.read()
        if hasattr(os, "wait4"):
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
            self.memory = usage.ru_maxrss / scale
        else:
            child.wait()
            self.memory = None
        self.seconds = time.perf_counter() - start
        self.text = output.decode(errors="replace")
        if child.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}\nended with {child.returncode}:\n{self.text[-4000:]}")

    def objects(self):
        """JSON objects among the lines."""
        lines = (line.strip() for line in self.text.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def expect(command, found, **wanted):
    """A figure of another model, length or number of threads than was asked for is none."""
    for key, value in wanted.items():
        if found.get(key) != value:
            sys.exit(f"{' '.join(map(str, command))}\n{key}: expected {value!r}, found {found.get(key)!r}")


class Loquat:
    name = "loquat"

    def __init__(self, folder, tier=None):
        self.folder, self.tier = folder, tier

    def variants(self, cell):
        return ["default"]

    def command(self, cell, model, _variant):
        n, group = cell.n, "decode" if cell.group == "busy" else cell.group
        tier = ["--tier", self.tier] if self.tier else []
        if group == "start":
            program, rest = "generate", ["--raw", "--max-tokens", 1, TEXT]
            tier = []
        else:
            program = "measure"
            none, decode = ["--prompt-tokens", 0], ["--gen-tokens", STEPS.get(group, 64)]
            rest = ["--repeat", 1, "--json"] + {
                "decode": none + decode + ["--depth", n],
                "prefill": ["--prompt-tokens", n, "--gen-tokens", 0],
                "batched": none + decode + ["--depth", OWN, "--batch", n],
                "shared": none + decode + ["--depth", COMMON, "--batch", n, "--shared"],
                "memory": ["--prompt-tokens", 128, "--gen-tokens", 64],
            }[group]
        return [tool(self.folder, program), "--model", model, "--threads", cell.threads, *tier, *rest]

    def figure(self, cell, command, model, ran):
        if cell.group == "start":
            return ran.seconds * 1e3
        [report] = ran.objects()
        expect(command, report, model=str(model), threads=cell.threads)
        if cell.group == "memory":
            return ran.memory
        [one] = report["cells"]
        expect(command, one, **{
            "decode": {"what": "decode", "depth": cell.n, "tokens": STEPS["decode"], "batch": 1},
            "busy": {"what": "decode", "depth": cell.n, "tokens": STEPS["decode"], "batch": 1},
            "prefill": {"what": "prefill", "tokens": cell.n, "batch": 1},
            "batched": {"what": "decode", "depth": OWN, "tokens": STEPS["batched"], "batch": cell.n, "shared": False},
            "shared": {"what": "decode", "depth": COMMON, "tokens": STEPS["shared"], "batch": cell.n, "shared": True},
        }[cell.group])
        return one["tok_s"]


class Llama:
    name = "llama.cpp"

    def __init__(self, folder):
        self.folder, self.version = folder, None

    def variants(self, cell):
        attention = ["fa off", "fa on"]
        return [f"{a}, {kv}" for a in attention for kv in ["kv split", "kv unified"]] if cell.group == "shared" else attention

    def command(self, cell, model, variant):
        n, t = cell.n, cell.threads
        on, cache = "on" if "fa on" in variant else "off", ["-ctk", "f16", "-ctv", "f16"]
        if cell.group == "start":
            return [tool(self.folder, "llama-completion"), "-m", model, "-t", t, "-n", 1, "-p", TEXT, "-no-cnv", "--no-warmup",
                    "-c", 4096, "-fa", on, *cache]
        if cell.group in ["batched", "shared"]:
            pp, tg = (OWN if cell.group == "batched" else COMMON), STEPS[cell.group]
            # A context holds whole cells of 256 for each sequence; unified, all of them together.
            own = -(-(pp + tg + 1) // 256) * 256
            extra = (["-pps"] if cell.group == "shared" else []) + (["-kvu"] if "unified" in variant else [])
            return [tool(self.folder, "llama-batched-bench"), "-m", model, "-t", t, "-tb", t, "-c", own * n, "-b", 2048, "-ub", 512,
                    "-npp", pp, "-ntg", tg, "-npl", n, "-fa", on, *cache, *extra, "--output-format", "jsonl"]
        p, g, d = {
            "decode": (0, STEPS["decode"], n),
            "busy": (0, STEPS["decode"], n),
            "prefill": (n, 0, 0),
            "memory": (128, 64, 0),
        }[cell.group]
        return [tool(self.folder, "llama-bench"), "-m", model, "-t", t, "-p", p, "-n", g, "-d", d, "-r", 1,
                "-fa", 1 if on == "on" else 0, *cache, "-o", "jsonl"]

    def figure(self, cell, command, model, ran):
        if cell.group == "start":
            return ran.seconds * 1e3
        found = ran.objects()
        if cell.group in ["batched", "shared"]:
            [one] = found
            pp = OWN if cell.group == "batched" else COMMON
            expect(command, one, pp=pp, tg=STEPS[cell.group], pl=cell.n, n_threads=cell.threads,
                   is_pp_shared=int(cell.group == "shared"))
            return one["speed_tg"]
        for one in found:
            self.version = f"build {one['build_number']} ({one['build_commit']})"
            expect(command, one, model_filename=str(model), n_threads=cell.threads, type_k="f16", type_v="f16")
        if cell.group == "memory":
            return ran.memory
        [one] = found
        expect(command, one, n_prompt=cell.n if cell.group == "prefill" else 0, n_depth=0 if cell.group == "prefill" else cell.n,
               n_gen=0 if cell.group == "prefill" else STEPS["decode"])
        [speed] = one["samples_ts"]
        return speed


class Candle:
    """Quantised Llama alone, with rotary tables for 4,096 positions: what it cannot run is left out."""

    name = "candle"

    def __init__(self, program):
        self.program = program

    def variants(self, cell):
        fits = cell.group in ["batched", "busy"] or cell.group in ["decode", "prefill"] and cell.n + STEPS["decode"] <= 4096
        return ["default"] if fits else []

    def command(self, cell, model, _variant):
        rest = ["prefill", cell.n] if cell.group == "prefill" else (
            ["decode", OWN, STEPS["batched"], cell.n] if cell.group == "batched" else ["decode", cell.n, STEPS["decode"], 1])
        return [self.program, model, *rest]

    def environment(self, cell):
        return {"RAYON_NUM_THREADS": str(cell.threads)}

    def figure(self, cell, command, _model, ran):
        [one] = ran.objects()
        expect(command, one, **{
            "prefill": {"what": "prefill", "tokens": cell.n, "batch": 1},
            "batched": {"what": "decode", "depth": OWN, "tokens": STEPS["batched"], "batch": cell.n},
        }.get(cell.group, {"what": "decode", "depth": cell.n, "tokens": STEPS["decode"], "batch": 1}))
        return one["tok_s"]


def measured(engine, cell, model, variant):
    """One sample, alone or beside a process that does nothing but run."""
    command = engine.command(cell, model, variant)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if cell.group == "busy" else None
    try:
        environment = engine.environment(cell) if hasattr(engine, "environment") else None
        ran = Ran(command, environment)
    finally:
        if busy:
            busy.kill()
            busy.wait()
    return engine.figure(cell, command, model, ran), [str(part) for part in command]
