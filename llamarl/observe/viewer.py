"""The part of the report that shows samples: its HTML, with the script, the style and the data
inside. It asks no server for anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llamarl.observe.samples import Shown
from llamarl.words.choices import GROUP_FIELDS

MOST_BYTES = 1 << 24  # of the samples in a page

_HERE = Path(__file__).parent
# No script, style or image of anywhere else is ever asked for, whatever stands in the data.
POLICY = (
    "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
THEME = """<button id='theme' type='button'>dark / light</button><script>
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const prefers = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || prefers) === "dark" ? "light" : "dark";
});
const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
if (asked) document.documentElement.dataset.theme = asked;
</script>"""
CONTROLS = """
<p class='quiet'>Keys: <kbd>j</kbd> <kbd>k</kbd> next and previous step, <kbd>g</kbd> next group,
<kbd>c</kbd> next colour, <kbd>/</kbd> search; in the tokens <kbd>←</kbd> <kbd>→</kbd>.</p>
<div class='controls'>
<button id='previous' type='button' aria-label='previous step'>◀</button>
<input id='step' type='range' min='0' value='0' aria-label='step'>
<button id='next' type='button' aria-label='next step'>▶</button>
<strong id='samples-note' aria-live='polite'></strong>
</div>
<div class='controls'>
<label>steps <input id='step-first' type='number' placeholder='first'></label>
<label>to <input id='step-last' type='number' placeholder='last'></label>
<label>a reward of <input id='reward-low' type='number' step='any' placeholder='least'></label>
<label>to <input id='reward-high' type='number' step='any' placeholder='most'></label>
<label>groups <select id='taught'><option value='all'>all</option>
<option value='taught'>that taught</option><option value='not'>that did not</option></select>
</label>
<label>text <input id='search' type='search'></label>
<label>colour tokens by <select id='colour'></select></label>
</div>
<div id='groups' class='chips'></div><p id='groups-note' class='quiet'></p>
<div id='group-buttons' class='controls'></div>
<div id='legend' class='controls'></div>
<div id='group'></div>
"""


def style() -> str:
    """Return the style of a page."""
    return (_HERE / "viewer.css").read_text()


def samples_html(samples: Sequence[Shown], *, most_bytes: int = MOST_BYTES) -> str:
    """Return the HTML of samples. If they are more than most_bytes, evenly spread steps of them are
    shown, and the page says so.
    """
    if not samples:
        return (
            "<p class='quiet'>None were kept: metrics.samples=N keeps those of N groups a step.</p>"
        )
    shown = list(samples)
    text = _in_script(shown)
    while len(text) > most_bytes and len(shown) > 1:
        shown = shown[::-1][::2][::-1]  # the newest stays
        text = _in_script(shown)
    note = ""
    if len(shown) < len(samples):
        note = f"<p class='quiet'>{len(shown)} of {len(samples)} kept steps are in this page.</p>"
    script = (_HERE / "viewer.js").read_text()
    data = f"<script type='application/json' id='samples-data'>{text}</script>"
    return f"{note}{CONTROLS}{data}<script>{script}</script>"


def _in_script(samples: Sequence[Shown]) -> str:
    """Return the data as JSON that no text in it can end: "<" is written as JSON's escape."""
    data = {"group_fields": GROUP_FIELDS, "samples": samples}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
