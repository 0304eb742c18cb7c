"""What the page of the learning signal looks like, and the script that answers to keys, pointer and filter.

Every colour of text is readable on every background a token can get, in both themes (tests/browser measures it).
The script writes text as text nodes and clones of what is there, never as markup.
"""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1a1e24; --soft: #5b6470; --line: #dfe3e8;
  --up: 33 102 190; --down: 205 50 38; --odd: #a3009b; --accent: #2166be; --strength: .62; }
@media (prefers-color-scheme: dark) { :root { --page: #101318; --card: #181c22; --ink: #e7eaee; --soft: #a0a9b4;
  --line: #2c333c; --up: 60 130 225; --down: 226 76 60; --odd: #ff7df6; --accent: #6fa8ef; --strength: .62; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 76rem;
  margin: 0 auto; padding: 1.5rem 1.25rem 30vh; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1.6rem 0 .2rem; } .group > .prompt { margin: 0 0 .6rem; }
.said { max-width: 60rem; color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
.sums { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: .6rem; margin: 0 0 1rem; }
.sums div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .65rem; }
.sums dt { color: var(--soft); font-size: .78rem; } .sums dd { margin: 0; font-size: 1.05rem; font-weight: 600;
  font-variant-numeric: tabular-nums; } .sums small { display: block; font-size: .75rem; font-weight: 400;
  color: var(--soft); }
.legend { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .75rem; }
.legend .scale { display: flex; margin: 0 0 .4rem; font-size: .8rem; font-variant-numeric: tabular-nums; }
.legend .scale span { flex: 1; text-align: center; padding: .2rem 0; }
.legend p { margin: 0; font-size: .82rem; color: var(--soft); } .legend .t { color: var(--ink); padding: 0 .25em; }
.bar { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center;
  background: var(--page); padding: .7rem 0; border-bottom: 1px solid var(--line); margin-bottom: .9rem;
  font-size: .88rem; }
.bar input[type=search] { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; padding: .35rem .6rem; width: min(22rem, 100%); }
.bar label { display: inline-flex; gap: .4rem; align-items: center; } .bar output { color: var(--soft); }
.row { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .65rem .85rem;
  margin: 0 0 .8rem; content-visibility: auto; contain-intrinsic-size: auto 9rem; }
.row header { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: baseline; font-size: .84rem;
  font-variant-numeric: tabular-nums; color: var(--soft); }
.row header b { color: var(--ink); font-weight: 600; } .row header .who { font-size: .95rem; }
.row .weight { display: inline-block; width: 7rem; height: .55em; border-radius: .3em; background: var(--line);
  overflow: hidden; vertical-align: baseline; margin-right: .35em; }
.row .weight i { float: left; height: 100%; background: rgb(var(--up)); }
.row .weight i + i { background: rgb(var(--down)); }
.out { border: 1px solid currentColor; border-radius: .3em; padding: 0 .35em; font-size: .9em; }
.prompt, .tokens { font: 13px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .45rem 0 0; }
.prompt { color: var(--soft); max-height: 9em; overflow-y: auto; line-height: 1.5; }
.grouped .row .prompt { display: none; }
.tokens { font-size: 15px; }
.t { --a: 0; border-radius: .2em; padding: .12em 0; scroll-margin: 6rem; }
.t.u, .t.d { --a: calc((.12 + .88 * min(1, var(--s) * var(--k, 1))) * var(--strength)); }
.by-row .t { --k: var(--row); }
.t.u { background-color: rgb(var(--up) / var(--a)); box-shadow: inset 0 .13em rgb(var(--up) / min(1, 1.6 * var(--a))); }
.t.d { background-color: rgb(var(--down) / var(--a));
  box-shadow: inset 0 -.13em rgb(var(--down) / min(1, 1.6 * var(--a))); }
.t.clip { text-decoration: underline dotted; text-underline-offset: .3em; }
.t.odd { outline: 2px solid var(--odd); } .t.none, .x { color: var(--soft); }
.special { border: 1px solid currentColor; border-radius: .45em; padding: 0 .3em; margin: 0 1px; font-size: .86em; }
.t:hover, .t:focus { outline: 2px solid var(--accent); outline-offset: 1px; }
i[class] { font-style: normal; } .tokens i::before, .prompt i::before, #tip i::before { color: var(--soft);
  font-size: .85em; } i.n::before { content: "\\21b5"; } i.tab::before { content: "\\21e5"; }
i.s { position: relative; } i.s::before { content: "\\b7"; position: absolute; left: .12em; }
i.c::before { content: attr(data-c); border: 1px dotted; border-radius: .3em; padding: 0 .15em; }
#tip { position: fixed; z-index: 3; pointer-events: none; background: var(--card); color: var(--ink);
  width: max-content; max-width: min(27rem, calc(100vw - 1rem));
  border: 1px solid var(--soft); border-radius: .5rem; padding: .5rem .7rem;
  font-size: .82rem; box-shadow: 0 4px 18px rgb(0 0 0 / .22); }
#tip .what { font: 600 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 5.6em; overflow: hidden; margin: 0 0 .3rem; }
#tip table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
#tip td { padding: 0 .9rem 0 0; white-space: nowrap; }
#tip td + td { font-weight: 600; padding: 0;
  white-space: normal; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media print { .bar, #tip { display: none; } .row { content-visibility: visible; break-inside: avoid; } }
"""

SCRIPT = r"""
"use strict";
const one = (query, from = document) => from.querySelector(query);
const all = (query, from = document) => [...from.querySelectorAll(query)];
const tip = one("#tip"), list = one("#rows"), rows = all(".row"), cache = new WeakMap();

const tokens = row => {
  if (!cache.has(row)) cache.set(row, all(".tokens .t[data-i]", row));
  return cache.get(row);
};
const figures = token => {
  const row = token.closest(".row"), k = tokens(row).indexOf(token);
  const columns = all(".column", row).map(c => [c.dataset.name, c.dataset.values.split(" ")[k]]);
  return [...columns, ["reward of sample", row.dataset.sample]];
};
function line(name, value) {
  const tr = document.createElement("tr");
  for (const text of [name, value]) tr.appendChild(document.createElement("td")).textContent = text;
  return tr;
}
function show(token) {
  const what = document.createElement("p"), table = document.createElement("table");
  what.className = "what";
  what.append(...token.cloneNode(true).childNodes);
  const row = token.closest(".row");
  table.append(line("token", `${token.dataset.i} of ${row.dataset.count}`));
  for (const [name, value] of figures(token)) table.append(line(name, value));
  tip.replaceChildren(what, table);
  tip.hidden = false;
  const at = token.getClientRects()[0] || token.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 8))}px`;
  tip.style.top = `${Math.max(8, below ? at.bottom + 8 : at.top - own.height - 8)}px`;
}
function hide() {
  tip.hidden = true;
}
function go(token) {
  if (!token) return;
  token.tabIndex = 0;
  for (const other of tokens(token.closest(".row"))) if (other !== token && other.tabIndex === 0) other.tabIndex = -1;
  token.setAttribute("aria-describedby", "tip");
  token.focus();
}
function visible() {
  return all(".row").filter(row => !row.hidden && tokens(row).length);
}
function moved(token, key) {
  const row = token.closest(".row"), line = tokens(row), k = line.indexOf(token), rows = visible();
  const other = rows[rows.indexOf(row) + (key === "ArrowDown" ? 1 : -1)];
  const strongest = row => one(".t[data-first]", row) || tokens(row)[0];
  return { ArrowRight: line[k + 1], ArrowLeft: line[k - 1], Home: line[0], End: line.at(-1),
    ArrowDown: other && strongest(other), ArrowUp: other && strongest(other) }[key];
}
const token = event => event.target.closest && event.target.closest(".tokens .t[data-i]");
document.addEventListener("pointerover", event => token(event) ? show(token(event)) : follow());
document.addEventListener("click", event => token(event) && go(token(event)));
document.addEventListener("focusin", event => token(event) ? show(token(event)) : hide());
document.addEventListener("focusout", hide);
function follow() {
  if (token({ target: document.activeElement })) show(document.activeElement);
  else hide();
}
document.addEventListener("scroll", follow, { passive: true });
document.addEventListener("keydown", event => {
  if (event.key === "Escape") return hide();
  if (event.key === "/" && event.target !== one("#filter")) { event.preventDefault(); return one("#filter").focus(); }
  if (!token(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    event.preventDefault();
    go(moved(token(event), event.key));
  }
});

const hay = new Map(rows.map(row => [row, row.textContent.toLowerCase()]));
function filter() {
  const words = one("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) row.hidden = !words.every(word => hay.get(row).includes(word));
  for (const group of all(".group")) group.hidden = !all(".row", group).some(row => !row.hidden);
  one("#found").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
}
function group() {
  const on = one("#group").checked, groups = new Map();
  document.body.classList.toggle("grouped", on);
  for (const row of rows) groups.set(row.dataset.prompt, [...(groups.get(row.dataset.prompt) || []), row]);
  const weight = rows => rows.reduce((sum, row) => sum + Number(row.dataset.influence), 0);
  const order = (a, b) => (weight(b) > weight(a)) - (weight(b) < weight(a));  // infinite ones too
  const sections = [...groups.values()].sort(order).map(rows => {
    const section = document.createElement("section"), head = document.createElement("h2");
    section.className = "group";
    head.textContent = `Prompt ${rows[0].dataset.prompt}: ${rows.length} samples shown, ` +
      `Σ|dlogp| ${weight(rows).toPrecision(3)}`;
    section.append(head, one(".prompt", rows[0]).cloneNode(true), ...rows);
    return section;
  });
  list.replaceChildren(...(on ? sections : rows));
  filter();
}
one("#filter").addEventListener("input", filter);
one("#group").addEventListener("change", group);
one("#by-row").addEventListener("change", event => document.body.classList.toggle("by-row", event.target.checked));
one(".bar").hidden = false;
group();
"""
