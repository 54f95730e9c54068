"""A report's blocks as one HTML file with everything inside, or as Markdown with pictures beside it.

Blocks: ("heading", text), ("text", text), ("table", [head], [[cell]]), ("figures", [(figure, caption)]),
("samples", title, [(label, [(name, text)])]). Texts are plain; everything is escaped here.
Invariant: a page needs nothing from outside, reads at 360 and at 1,600 pixels, in light and in dark.
"""
import html
import io
import pathlib
import re

from eval import plots
from eval.command import write_whole

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --panel: #fff; --ink: #1c2530; --soft: #5b6875; --grid: #d5dce3; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --panel: #1b2128; --ink: #e4e9ee; --soft: #9aa7b4; --grid: #39434e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 1.65rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 40px 0 8px; }
p { margin: 6px 0 12px; max-width: 72ch; color: var(--soft); overflow-wrap: anywhere; }
.table { overflow-x: auto; margin: 12px 0; border: 1px solid var(--grid); border-radius: 8px; background: var(--panel); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: left; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
td.number, th.number { text-align: right; }
td:first-child { white-space: normal; min-width: 8.5em; }
tbody tr:last-child td { border-bottom: 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 16px; margin: 12px 0; }
figure { margin: 0; padding: 12px; background: var(--panel); border: 1px solid var(--grid); border-radius: 8px; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 440px; height: auto; margin: 0 auto; }
figcaption { font-size: .875rem; font-weight: 600; margin: 0 4px 8px; }
details { margin: 8px 0; background: var(--panel); border: 1px solid var(--grid); border-radius: 8px; }
summary { padding: 8px 14px; cursor: pointer; font-size: .875rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); border-top: 1px solid var(--grid); }
.sides > div { padding: 10px 14px; min-width: 0; }
.sides b { font-size: .75rem; color: var(--soft); font-weight: 600; }
pre { margin: 4px 0 0; font: .8125rem/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 22em; overflow-y: auto; }
@media (max-width: 480px) { main { padding: 20px 12px 48px; } figure { padding: 10px 6px; } th, td { padding: 6px 8px; } }
@media print { details > * { display: block; } figure, .table { break-inside: avoid; } }
"""

_NUMBER = re.compile(r"^[-+]?[\d.,]+( ?[%x]| MiB)?( ± [\d.]+)?$")


def _svg(figure, index):
    out = io.StringIO()
    with plots.matplotlib.rc_context({"svg.hashsalt": f"figure {index}"}):
        figure.savefig(out, format="svg", dpi=150, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plots.plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg"):].replace(plots.INK, "currentColor").replace(plots.GRID, "var(--grid)")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    for name in sorted(set(re.findall(r' id="([^"]+)"', text)), key=len, reverse=True):  # unique in the page
        text = re.sub(rf'(id="|href="#|url\(#){re.escape(name)}(?=["\)])', rf"\g<1>f{index}-{name}", text)
    for size in ("width", "height"):  # the page's style sizes it
        text = re.sub(rf'<svg ([^>]*?) {size}="[^"]*"', r"<svg \1", text, count=1)
    return text


def _html_table(head, rows):
    numeric = [all(_NUMBER.match(row[i]) or row[i] in ("", "-") for row in rows) for i in range(len(head))]

    def line(cells, tag):
        kinds = (' class="number"' if is_number else "" for is_number in numeric)
        return "<tr>" + "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds)) + "</tr>"
    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="table"><table><thead>{line(head, "th")}</thead>\n<tbody>{body}</tbody></table></div>'


def to_html(title, blocks):
    parts, n = [], 0
    for kind, *content in blocks:
        if kind == "heading":
            parts.append(f"<h2>{html.escape(content[0])}</h2>")
        elif kind == "text":
            parts.append(f"<p>{html.escape(content[0])}</p>")
        elif kind == "table":
            parts.append(_html_table(*content))
        elif kind == "figures":
            parts.append('<div class="figures">')
            for figure, caption in content[0]:
                n += 1
                svg = _svg(figure, n).replace("<svg ", f'<svg role="img" aria-label="{html.escape(caption)}" ', 1)
                parts.append(f"<figure><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>")
            parts.append("</div>")
        else:
            for label, sides in content[1]:
                cells = "".join(f"<div><b>{html.escape(name)}</b><pre>{html.escape(text)}</pre></div>" for name, text in sides)
                parts.append(f'<details><summary>{html.escape(label)}</summary><div class="sides">{cells}</div></details>')
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) +
            "\n</main>\n</body>\n</html>\n")


def _cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def to_markdown(title, blocks, folder):
    """Pictures go into `folder`, which lies beside the Markdown file."""
    parts, n = [f"# {title}"], 0
    for kind, *content in blocks:
        if kind == "heading":
            parts.append(f"## {content[0]}")
        elif kind == "text":
            parts.append(content[0])
        elif kind == "table":
            head, rows = content
            lines = [head, ["---"] * len(head), *rows]
            parts.append("\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines))
        elif kind == "figures":
            folder.mkdir(exist_ok=True)
            for figure, caption in content[0]:
                n += 1
                name = folder / f"{n:02d}.png"
                out = io.BytesIO()
                figure.savefig(out, format="png", dpi=150, facecolor="white")
                plots.plt.close(figure)
                write_whole(name, out.getvalue())
                parts.append(f"**{caption}**\n\n![{caption}]({folder.name}/{name.name})")
        else:
            for label, sides in content[1]:
                fenced = [f"{name}:\n\n" + re.sub("^", "    ", text, flags=re.M) for name, text in sides]
                parts.append(f"<details><summary>{html.escape(label)}</summary>\n\n" + "\n\n".join(fenced) + "\n\n</details>")
    return "\n\n".join(parts) + "\n"


def write(path, title, blocks):
    """HTML unless the name ends in .md; whole or not at all."""
    path = pathlib.Path(path)
    if path.suffix == ".md":
        text = to_markdown(title, blocks, path.with_name(path.stem + "_files"))
    else:
        text = to_html(title, blocks)
    write_whole(path, text)
