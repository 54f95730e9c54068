"""The README's picture: decoding speed by depth of the context, each engine a line.

    python3 bench/figure.py bench/results/MACHINE/MODEL.csv >docs/speed.svg

An SVG that follows the reader's light or dark colours, written by hand so that it needs no package. tests/test_docs.py compares
docs/speed.svg with what this makes of the committed table.
"""
import csv
import sys

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 48, 196, 40, 44  # margins; names of the lines stand at the right
LINES = [  # engine in the table, name shown, class of its colour
    ("DeepTutor TLC 1024", "DeepTutor, TLC 1024", "evicted"),
    ("DeepTutor", "DeepTutor, TLC off", "full"),
    ("OpenVINO", "OpenVINO GenAI", "other"),
    ("llama.cpp", "llama.cpp", "llama"),
]
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .faint { fill: #59636e }
  .grid { stroke: #d1d9e0; stroke-width: 1 } .line { fill: none; stroke-width: 2.5 }
  .evicted { stroke: #0a7d33 } .full { stroke: #0969da } .llama { stroke: #bc4c00 } .other { stroke: #818b98 }
  circle.evicted { fill: #0a7d33 } circle.full { fill: #0969da } circle.llama { fill: #bc4c00 } circle.other { fill: #818b98 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d }
    .evicted { stroke: #3fb950 } .full { stroke: #58a6ff } .llama { stroke: #f0883e } .other { stroke: #9198a1 }
    circle.evicted { fill: #3fb950 } circle.full { fill: #58a6ff } circle.llama { fill: #f0883e } circle.other { fill: #9198a1 }
  }
"""


def read(path):
    """engine -> [(depth, tokens per second)], ascending."""
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["test"] == "decode":
                found.setdefault(row["engine"], []).append((int(row["depth"]), float(row["median"])))
    return {engine: sorted(points) for engine, points in found.items()}


def draw(points):
    deepest = max(depth for line in points.values() for depth, _ in line)
    step = 100
    top = -(-max(speed for line in points.values() for _, speed in line) // step) * step

    def x(depth):
        return LEFT + (WIDTH - LEFT - RIGHT) * depth / deepest

    def y(speed):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * speed / top

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
           "<title>Decoding speed against depth of the context</title>", f"<style>{STYLE}</style>",
           f'<text class="title" x="{LEFT}" y="20">Decoding, tokens per second</text>']
    for speed in range(0, int(top) + 1, step):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>')
        out.append(f'<text class="faint" x="{LEFT - 8}" y="{y(speed) + 4.5:.1f}" text-anchor="end">{speed}</text>')
    for depth in sorted({depth for line in points.values() for depth, _ in line}):
        out.append(f'<text class="faint" x="{x(depth):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{depth:,}</text>')
    out.append(f'<text class="faint" x="{x(deepest / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">tokens of context before it</text>')
    below = TOP
    for engine, name, kind in sorted((line for line in LINES if line[0] in points), key=lambda line: -points[line[0]][-1][1]):
        path = " ".join(f"{x(depth):.1f},{y(speed):.1f}" for depth, speed in points[engine])
        out.append(f'<polyline class="line {kind}" points="{path}"/>')
        out += [f'<circle class="{kind}" cx="{x(depth):.1f}" cy="{y(speed):.1f}" r="3.5"/>' for depth, speed in points[engine]]
        below = max(y(points[engine][-1][1]) + 4.5, below)
        out.append(f'<text x="{x(deepest) + 10:.1f}" y="{below:.1f}">{name}: {points[engine][-1][1]:.0f}</text>')
        below += 17  # names that would lie on each other move apart
    return "\n".join(out) + "\n</svg>\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 bench/figure.py FILE.csv")
    sys.stdout.write(draw(read(sys.argv[1])))
