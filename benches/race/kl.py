#!/usr/bin/env python3
"""What fast arithmetic costs in accuracy: loquat's and llama.cpp's, each against its own exact arithmetic, on the same text.

The distributions of two engines that both compute in f32 differ by rounding alone, so that the exact path of each can stand for
the truth. loquat has one: `measure --accuracy`, f32 activations and an f32 cache on exactly dequantised weights. llama.cpp always
rounds activations where weights are quantised; its truth is the same file with every matrix dequantised to F32 (llama-quantize
--allow-requantize), run with an f32 cache, whose distributions llama-perplexity keeps and compares others with. It keeps
them in 16 bits, a step being up to 16 / 65,535 nats, which bounds how small a divergence it can see: the first line of the table is what it
finds between the truth and itself. Both score the second half of windows of the same size. The perplexities of both truths are
printed: where they agree, so do text, tokens and windows.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import peers
from cells import Ran, expect
from peers import say, tool

FIXTURE = peers.REPOSITORY / "tests" / "fixtures" / "smollm2" / "text.json"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_1", help="of " + ", ".join(peers.FORMATS))
    parser.add_argument("--window", type=int, default=1024, help="tokens run at a time (default 1024)")
    parser.add_argument("--windows", type=int, default=2, help="so many (default 2; the text has 7 of 1024)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build", choices=list(peers.KINDS), default="native")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--loquat-bin", type=Path)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def number(name, text):
    found = re.search(name + r"[^:\n]*:\s*(-?[\d.]+)", text)
    return float(found[1]) if found else sys.exit(f"expected {name!r} in what llama-perplexity says, found\n{text[-3000:]}")


def main():
    args = arguments()
    llama_bin = args.llama_bin or peers.build_llama(args.build, peers.os.cpu_count())
    loquat_bin = args.loquat_bin or peers.build_loquat()
    say("making F32")
    exact = peers.model("F32", llama_bin)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text, base = Path(folder) / "text.txt", Path(folder) / "base.kld"
        text.write_text(json.loads(FIXTURE.read_text())["text"])
        common = [tool(llama_bin, "llama-perplexity"), "-f", text, "-c", args.window, "-b", args.window, "-ub", 512,
                  "--chunks", args.windows, "-t", args.threads, "-tb", args.threads]
        in_f32 = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
        say("the truth of llama.cpp")
        Ran([*common, "-m", exact, *in_f32, "--kl-divergence-base", base])
        against = ["--kl-divergence-base", base, "--kl-divergence"]
        for name in ["F32", *args.formats.split(",")]:
            say(name)
            cache = in_f32 if name == "F32" else ["-fa", "on", "-ctk", "f16", "-ctv", "f16"]
            said = Ran([*common, "-m", peers.model(name, llama_bin), *cache, *against]).text
            rows.append(("llama.cpp", name, {
                "kl_mean": number("Mean +KLD", said), "kl_median": number("Median +KLD", said), "kl_p99": number("99.0% +KLD", said),
                "kl_max": number("Maximum KLD", said), "same_top": number("Same top p", said) / 100,
                "exact_perplexity": number(r"Mean PPL\(base\)", said), "fast_perplexity": number(r"Mean PPL\(Q\)", said)}))
    for name in args.formats.split(","):
        path = peers.model(name, llama_bin)
        command = [tool(loquat_bin, "measure"), "--model", path, "--threads", args.threads, "--accuracy", FIXTURE, "--json",
                   "--window", args.window, "--windows", args.windows]
        [report] = Ran(command).objects()
        expect(command, report, model=str(path), window=args.window, windows=args.windows)
        rows.append(("loquat", name, report["second_half"]))
    print(f"second halves of {args.windows} windows of {args.window} tokens; divergence in nats\n")
    print("| engine | model | mean KL | median | 99 % | most | same top | perplexity, exact | fast |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for engine, name, f in rows:
        parts = [f"{f[key]:.6f}" for key in ["kl_mean", "kl_median", "kl_p99", "kl_max"]]
        print(f"| {engine} | {name} | {' | '.join(parts)} | {f['same_top'] * 100:.2f} % | {f['exact_perplexity']:.4f} | "
              f"{f['fast_perplexity']:.4f} |")
    if args.out:
        args.out.write_text(json.dumps([{"engine": e, "model": n, **f} for e, n, f in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
