"""Charts as SVG, by hand: one file each, light or dark as the reader's page is."""

import html
import math

STYLE = """
  svg { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --ours: #0969da; --peer: #818b98; --wait: #bc4c00; --bad: #cf222e; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --ours: #4493f8; --peer: #7d8590; --wait: #db6d28; --bad: #f85149; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--soft); }
  .title { font-size: 14px; font-weight: 600; fill: var(--ink); } .name { fill: var(--ink); } .end { text-anchor: end; }
  .middle { text-anchor: middle; } .ours { font-weight: 600; fill: var(--ours); } .grid { stroke: var(--line); stroke-width: 1; }
"""
WIDTH = 860
LEFT = 190


def svg(height, parts, label):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def text(x, y, words, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(str(words))}</text>'


def line(x1, y1, x2, y2, color="", width=1, kind=""):
    style = f' style="stroke: var(--{color}); stroke-width: {width}"' if color else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"{style}/>'


def short(value):
    """A number with two digits that count."""
    if value is None:
        return "-"
    if 0 < value < 0.01:
        return "< 0.01"
    if value >= 1_000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


class Log:
    """A logarithmic axis."""

    def __init__(self, values, first, last):
        values = [value for value in values if value and value > 0] or [1, 10]
        self.low = 10 ** math.floor(math.log10(min(values)))
        self.high = 10 ** math.ceil(math.log10(max(values)) + 1e-9)
        self.high = max(self.high, 10 * self.low)
        self.first, self.last = first, last

    def __call__(self, value):
        part = math.log(max(value or self.low, self.low) / self.low) / math.log(self.high / self.low)
        return self.first + part * (self.last - self.first)

    def ticks(self):
        return [10.0**power for power in range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)]


MARKS = [("p50", 5), ("p90", 3.5), ("p99", 3.5), ("p99.9", 2.5), ("longest", 2.5)]


def spreads(title, unit, rows):
    """Distributions, a row each: a dot at the median, then 90, 99, 99.9 % and the longest. `rows`: name, is ours, values."""
    top, step = 52, 24
    height = top + step * len(rows) + 34
    scale = Log([row[2][key] for row in rows for key, _ in MARKS], LEFT, WIDTH - 20)
    parts = [text(0, 16, title, "title"), text(0, 34, f"{unit}; a dot at the median, marks at 90, 99 and 99.9 %, a bar at the longest")]
    for tick in scale.ticks():
        parts += [line(scale(tick), top - 8, scale(tick), height - 26, kind="grid")]
        parts += [text(scale(tick), height - 10, short(tick), "middle")]
    for number, (name, is_ours, values) in enumerate(rows):
        y, color = top + step * number + 8, "ours" if is_ours else "peer"
        places = {key: scale(values[key]) for key, _ in MARKS}
        parts.append(text(LEFT - 12, y + 4, name, "end ours" if is_ours else "end name"))
        parts.append(line(places["p50"], y, places["longest"], y, color, 1))
        parts.append(line(places["p50"], y, places["p99"], y, color, 4))
        parts.append(f'<circle cx="{places["p50"]:.1f}" cy="{y}" r="5" style="fill: var(--{color})"/>')
        for key, half in (("p90", 4), ("p99", 6), ("p99.9", 4), ("longest", 7)):
            parts.append(line(places[key], y - half, places[key], y + half, color, 2))
    return svg(height, parts, title)


def timelines(title, rows, limit, fault_at, frozen):
    """A panel for each system: slots held, requests waiting, and what is over the limit. `rows`: name, is ours, timeline."""
    top, panel, gap = 56, 44, 18
    height = top + (panel + gap) * len(rows) + 26
    end = max(row[2][-1][0] for row in rows) + 0.1
    right = WIDTH - 20
    place = lambda seconds: LEFT + (right - LEFT) * seconds / end
    parts = [text(0, 16, title, "title")]
    legend = [("ours", "slots held"), ("wait", "requests waiting"), ("bad", "held over the limit")]
    for number, (color, words) in enumerate(legend):
        x = LEFT + 190 * number
        parts += [line(x, 32, x + 18, 32, color, 4), text(x + 24, 36, words)]
    for number, (name, is_ours, points) in enumerate(rows):
        base = top + (panel + gap) * number + panel
        most = max(limit, *(max(held, waiting) for _, held, waiting, _ in points))
        rise = lambda count: base - panel * count / most
        parts.append(text(LEFT - 12, base - panel / 2 + 4, name, "end ours" if is_ours else "end name"))
        width = max(1.0, (right - LEFT) / len(points))
        for seconds, held, _, _ in points:
            x = place(seconds)
            y = rise(min(held, limit))
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{base - y:.1f}" style="fill: var(--ours); opacity: .55"/>')
            if held > limit:
                over = rise(held)
                parts.append(f'<rect x="{x:.1f}" y="{over:.1f}" width="{width:.1f}" height="{y - over:.1f}" style="fill: var(--bad)"/>')
        path = " ".join(f"{place(seconds):.1f},{rise(waiting):.1f}" for seconds, _, waiting, _ in points)
        parts.append(f'<polyline points="{path}" style="fill: none; stroke: var(--wait); stroke-width: 1.5"/>')
        parts += [line(LEFT, base, right, base, kind="grid"), line(LEFT, rise(limit), right, rise(limit), kind="grid")]
        parts += [text(right + 4, rise(limit) + 4, limit)]
        parts.append(line(place(fault_at), base - panel - 4, place(fault_at), base, "bad", 1.5))
        if frozen:
            parts.append(line(place(fault_at + frozen), base - panel - 4, place(fault_at + frozen), base, "bad", 1))
    for tick in range(0, int(end) + 1, max(1, round(end / 10))):
        parts.append(text(place(tick), height - 8, f"{tick} s", "middle"))
    return svg(height, parts, title)


def bars(title, unit, rows, mark=None):
    """`rows`: name, is ours, value. `mark`: a value to compare with."""
    top, step = 52, 24
    height = top + step * len(rows) + 12
    most = max([row[2] or 0 for row in rows] + [mark or 0]) or 1
    place = lambda value: LEFT + (WIDTH - LEFT - 90) * value / most
    parts = [text(0, 16, title, "title"), text(0, 34, unit)]
    for number, (name, is_ours, value) in enumerate(rows):
        y, color = top + step * number, "ours" if is_ours else "peer"
        parts.append(text(LEFT - 12, y + 12, name, "end ours" if is_ours else "end name"))
        width = place(value or 0) - LEFT
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="15" rx="2" style="fill: var(--{color})"/>')
        parts.append(text(LEFT + width + 6, y + 12, short(value)))
    if mark:
        parts.append(line(place(mark), top - 6, place(mark), height - 8, "bad", 1.5))
    return svg(height, parts, title)


def curves(title, unit, across, rows):
    """Lines over a logarithmic axis. `rows`: name, is ours, points of x and y. Names stand at their ends, apart from each other."""
    top, height, right = 52, 420, WIDTH - 190
    sets = [row for row in rows if row[2]]
    xs, ys = ([point[one] for row in sets for point in row[2]] for one in (0, 1))
    x, y = Log(xs, 60, right), Log(ys, height - 40, top)
    x.low, x.high = min(xs), max(xs) if max(xs) > min(xs) else 10 * min(xs)
    parts = [text(0, 16, title, "title"), text(0, 34, unit)]
    for tick in y.ticks():
        parts += [line(60, y(tick), right, y(tick), kind="grid"), text(52, y(tick) + 4, short(tick), "end")]
    for tick in sorted(set(xs)):
        parts.append(text(x(tick), height - 20, f"{tick:,}", "middle"))
    parts.append(text((60 + right) / 2, height - 2, across, "middle"))
    ends = []
    for name, is_ours, points in sorted(sets, key=lambda row: row[1]):
        color = "ours" if is_ours else "peer"
        path = " ".join(f"{x(one):.1f},{y(two):.1f}" for one, two in points)
        parts.append(f'<polyline points="{path}" style="fill: none; stroke: var(--{color}); stroke-width: {2.5 if is_ours else 1.5}"/>')
        for one, two in points:
            parts.append(f'<circle cx="{x(one):.1f}" cy="{y(two):.1f}" r="3" style="fill: var(--{color})"/>')
        ends.append([y(points[-1][1]), x(points[-1][0]), name, is_ours])
    ends.sort(key=lambda end: (end[0], end[2]))
    last = -math.inf
    for wanted, x_end, name, is_ours in ends:
        last = max(wanted, last + 14)
        parts.append(line(x_end + 4, wanted, right + 14, last, "line"))
        parts.append(text(right + 18, last + 4, name, "ours" if is_ours else "name"))
    return svg(max(height, round(last) + 12), parts, title)
