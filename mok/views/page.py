"""HTML pages that hold everything they show: nothing is fetched, and a policy in the page forbids it."""

from __future__ import annotations

import html
from pathlib import Path

from mok.views.text import plain

_TIMELINE = Path(__file__).parent / "timeline"
STYLE = """
:root { color-scheme: light dark; --jp-layout-color0: #ffffff; --jp-layout-color2: #e6e6e6; --jp-ui-font-color1: #1a1a1a;
  --jp-ui-font-color2: #595959; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --jp-layout-color0: #16181d; --jp-layout-color2: #33363d;
  --jp-ui-font-color1: #ececec; --jp-ui-font-color2: #b4b8bf; --link: #8cc4ff; } .mok-timeline { --tl-accent: #56b4e9; } }
body { margin: 0 auto; max-width: 1280px; padding: 16px; background: var(--jp-layout-color0); color: var(--jp-ui-font-color1);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 28px; border-bottom: 1px solid var(--jp-layout-color2); }
table { border-collapse: collapse; } caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 3px 10px; border-bottom: 1px solid var(--jp-layout-color2);
  overflow-wrap: break-word; max-width: 70ch; }
th { white-space: nowrap; }
.scroll { overflow-x: auto; } a { color: var(--link); } figure { margin: 8px 0; } figcaption { color: var(--jp-ui-font-color2); }
figure svg { max-width: 100%; height: auto; }
"""


def escaped(text: object) -> str:
    """Any text as HTML that shows it and does nothing else."""
    return html.escape(plain(str(text)), quote=True)


def script(*, with_timeline: bool = True, boot: str = "") -> str:
    """The timeline's module and what starts it, as one inline module script."""
    parts = [(_TIMELINE / name).read_text(encoding="utf-8") for name in ("timeline.js", "page.js")] if with_timeline else []
    return f'<script type="module">\n{"".join(parts)}\n{{\n{boot}\n}}\n</script>'


def document(title: str, body: str, *, scripts: str = "", connect: str = "'none'") -> str:
    """A whole page. connect: what its scripts may talk to, as in a Content-Security-Policy; nothing by default."""
    policy = (
        f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    css = STYLE + (_TIMELINE / "timeline.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escaped(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{css}</style></head>\n<body>{body}\n{scripts}</body></html>\n'
    )
