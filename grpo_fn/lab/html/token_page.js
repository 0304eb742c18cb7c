"use strict"; // Text is written as text nodes and clones of what is there, never as markup.
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
