"""From samples to a table, a JSON file with all of them, and a plot that no package has to draw."""

import json
from pathlib import Path
from statistics import median


def best(cell, engine):
    """The better of an engine's variants by its median: its name, and its samples; or nothing."""
    mine = {key: values for key, values in cell["samples"].items() if key == engine or key.startswith(engine + ", ")}
    if not mine:
        return None
    choose = max if cell["more_is_better"] else min
    key = choose(mine, key=lambda k: median(mine[k]))
    return key[len(engine) + 2:], mine[key]


def ratios(cell, engine):
    """Of each round, how much better loquat was: above 1 is faster, or smaller."""
    ours, (_, theirs) = cell["samples"]["loquat"], best(cell, engine)
    return [a / b if cell["more_is_better"] else b / a for a, b in zip(ours, theirs)]


def number(value):
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def spread(values):
    return number(values[0]) if len(values) == 1 else f"{number(median(values))} ({number(min(values))} to {number(max(values))})"


def engines(results):
    """The peers that have samples."""
    names = [key.split(", ")[0] for cell in results["cells"] for key in cell["samples"]]
    return [name for name in dict.fromkeys(names) if name != "loquat"]


def line(cell):
    parts = [f"{cell['name']}, {cell['model']}, {cell['threads']} threads: loquat {spread(cell['samples']['loquat'])}"]
    for name in engines({"cells": [cell]}):
        variant, values = best(cell, name)
        parts.append(f"{name} {spread(values)} {variant}".strip() + f", ratio {median(ratios(cell, name)):.2f}")
    return "; ".join(parts) + f" {cell['unit']}"


def table(results):
    peers, machine = engines(results), results["machine"]
    out = ["# loquat and others", ""]
    out += [f"{results['date'][:10]}, {machine.get('processor')} (family {machine.get('family')}, model {machine.get('model')}), "
            f"{machine['cores']} cores, {machine['system']}.", ""]
    out += [results["note"], ""] if results["note"] else []
    out += ["| | |", "| --- | --- |"]
    out += [f"| instructions | {' '.join(machine.get('flags', []))} |"]
    out += [f"| {name} | {version} |" for name, version in results["versions"].items()]
    out += [f"| {name} | {m['bytes']} bytes, SHA-256 {m['sha256'][:16]}... |" for name, m in results["models"].items()]
    loads = [v for cell in results["cells"] for v in cell["load_average"] if v is not None]
    out += [f"| load average | {min(loads):.1f} to {max(loads):.1f} |"] if loads else []
    out += ["", f"Medians of {results['rounds']} rounds, the engines in turn, with the least and the most. Ratio: the median over rounds of "
            "how much faster (or smaller) loquat was, with the least and the most. Of llama.cpp the better of its variants, named beside it.", ""]
    out += ["| | model | threads | unit | loquat | " + " | ".join(f"{name} | variant | ratio" for name in peers) + " |"]
    out += ["| --- " * (5 + 3 * len(peers)) + "|"]
    for cell in results["cells"]:
        row = [cell["name"], cell["model"], str(cell["threads"]), cell["unit"], spread(cell["samples"]["loquat"])]
        for name in peers:
            found = best(cell, name)
            row += ["-", "-", "-"] if found is None else [spread(found[1]), found[0] or "-", ratio(ratios(cell, name))]
        out.append("| " + " | ".join(row) + " |")
    out += ["", "Commands, of each group the first:", ""]
    groups = set()
    for cell in results["cells"]:
        if cell["group"] not in groups:
            groups.add(cell["group"])
            out += [f"- {cell['name']}"] + [f"  - `{command}`" for command in cell["commands"].values()]
    out += ["", f"`{results['command']}`", ""]
    return "\n".join(out)


def ratio(values):
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


# Told apart by those who see few colours, and on paper; as in examples/support/plot.rs.
STYLES = [("#009e73", "none"), ("#d55e00", "7 4"), ("#0072b2", "2 3"), ("#555555", "12 4 2 4")]
PANEL, HEIGHT, GAP, TOP, BOTTOM = 420.0, 280.0, 80.0, 100.0, 56.0


def svg(results):
    """Decode time against depth and prefill time against length, of the first model on the most threads; or nothing."""
    names = ["loquat", *engines(results)]
    panels = []
    for group, title, across, up, time in [
        ("decode", "Time of a token by depth", "tokens before it", "milliseconds", lambda n, speed: 1e3 / speed),
        ("prefill", "Time of a prompt by length", "tokens", "milliseconds", lambda n, speed: n * 1e3 / speed),
    ]:
        cells = [c for c in results["cells"] if c["group"] == group]
        first = [c for c in cells if c["model"] == cells[0]["model"] and c["threads"] == max(d["threads"] for d in cells)]
        lines = []
        for name in names:
            points = [(c["n"], time(c["n"], median(best(c, name)[1]))) for c in first if best(c, name)]
            lines.append(sorted(points))
        if first:
            panels.append((f"{title}, {first[0]['model']}, {first[0]['threads']} threads", across, up, lines))
    if not panels:
        return None
    width, height = GAP + len(panels) * (PANEL + GAP), TOP + HEIGHT + BOTTOM
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
           'font-family="sans-serif" font-size="13">', '<rect width="100%" height="100%" fill="white"/>']
    heading = f"SmolLM2-135M, {results['machine'].get('processor')}, {results['date'][:10]}"
    out.append(text(GAP, 24, "start", f'<tspan font-size="16">{escaped(heading)}</tspan>'))
    for k, name in enumerate(names):
        x = GAP + 170 * k
        out += [stroke([(x, 50), (x + 34, 50)], k), text(x + 42, 54, "start", escaped(name))]
    for k, panel in enumerate(panels):
        out += drawn(GAP + k * (PANEL + GAP), *panel)
    return "\n".join([*out, "</svg>", ""])


def drawn(left, title, across, up, lines):
    points = [point for line in lines for point in line]
    most_x, most_y = max(x for x, _ in points) or 1, max(y for _, y in points)
    step_x, step_y = step(most_x), step(most_y)
    end_x, end_y = -(-most_x // step_x) * step_x, -(-most_y // step_y) * step_y
    at = lambda x, y: (left + PANEL * x / end_x, TOP + HEIGHT * (1 - y / end_y))
    out = [text(left + PANEL / 2, TOP - 12, "middle", escaped(title))]
    for i in range(round(end_y / step_y) + 1):
        _, y = at(0, i * step_y)
        out += [rule(left, y, left + PANEL, y), text(left - 6, y + 4, "end", f"{i * step_y:g}")]
    for i in range(round(end_x / step_x) + 1):
        x, _ = at(i * step_x, 0)
        out += [rule(x, TOP, x, TOP + HEIGHT), text(x, TOP + HEIGHT + 18, "middle", f"{i * step_x:g}")]
    out.append(text(left + PANEL / 2, TOP + HEIGHT + 40, "middle", across))
    out.append(f'<text transform="translate({left - 56:.1f} {TOP + HEIGHT / 2:.1f}) rotate(-90)" text-anchor="middle">{up}</text>')
    for k, line in enumerate(lines):
        if line:
            out.append(stroke([at(*point) for point in line], k))
            color = STYLES[k % len(STYLES)][0]
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in (at(*point) for point in line)]
    return out


def step(most):
    """A round distance between lines, four to nine of them."""
    power = 1.0
    while power * 10 <= most:
        power *= 10
    while power > most:
        power /= 10
    return next(power * m for m in [0.2, 0.25, 0.5, 1, 2] if most / (power * m) <= 9)


def stroke(points, k):
    color, dashes = STYLES[k % len(STYLES)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'


def rule(x1, y1, x2, y2):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#cccccc"/>'


def text(x, y, anchor, content):
    """`content` is markup."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def escaped(plain):
    return str(plain).replace("&", "&amp;").replace("<", "&lt;")


def write(results, out):
    """Writes all files; gives their paths."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    contents = {".json": json.dumps(results, indent=1) + "\n", ".md": table(results), ".svg": svg(results)}
    written = {out.parent / (out.name + ending): content for ending, content in contents.items() if content}
    for path, content in written.items():
        path.write_text(content)
    return list(written)
