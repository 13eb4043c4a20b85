// The table: searched, sorted, filtered; repeated blocks in one row each; only the rows that show are in the document.

const ROW_HEIGHT = 46;
const SPARE_ROWS = 8;
const collator = new Intl.Collator("en", { numeric: true });

const elements = (v) => product(v.shape);
// Of an entry: one variable, or those of a row of repeated blocks. `by`: what it is sorted by.
const COLUMNS = [
  { name: "variable", by: (e) => e.path, cell: (e) => clamped(pathNode(e.path), { title: e.path }) },
  { name: "times", number: true, by: (e) => e.all.length, cell: (e) => (e.times === 1 ? "" : e.all.length === e.times ? countText(e.times) : `${countText(e.all.length)} of ${countText(e.times)}`) },
  { name: "shape", by: (e) => elements(e.first), cell: (e) => clamped(e.follows ? "as its weight" : shapeText(e.first.shape)) },
  { name: "layout", by: (e) => (e.follows ? "" : e.first.layout.text), cell: (e) => layoutCell(e) },
  data.checkpoint
    ? { name: "kind", by: (e) => e.first.kind, cell: (e) => e.first.kind }
    : { name: "rule", by: (e) => (e.first.rule ? e.first.rule.number : e.ruleText), cell: (e) => clamped(e.ruleText, { title: e.first.rule?.pattern ?? e.ruleText }, e.first.noRule) },
  { name: "per device", number: true, by: (e) => e.deviceBytes, cell: (e) => (e.first.fits ? sizeText(e.deviceBytes) : "") },
  { name: "global", number: true, by: (e) => e.bytes, cell: (e) => sizeText(e.bytes) },
  { name: "shard", by: (e) => elements(e.first) / (e.first.fits ? product(e.first.layout.counts) : Infinity), cell: (e) => shardCell(e) },
  { name: "dtype", by: (e) => e.first.dtype, cell: (e) => e.first.dtype },
];

/** A cell of two lines at most, all of it in its title. */
const clamped = (text, attributes = {}, flagged = false) => make("span", { class: flagged ? "clamped flag" : "clamped", ...attributes }, text);

function layoutCell(e) {
  if (e.follows) return "as its weight";
  const v = e.first;
  const text = v.fits && v.layout.replicated ? "replicated" : v.layout.text;
  return clamped(v.uneven ? `${text} uneven` : text, { title: v.layout.text }, v.uneven);
}

function shardCell(e) {
  if (e.follows) return "";
  return e.first.fits ? clamped(shapeText(e.first.shape.map((n, axis) => n / e.first.layout.counts[axis]))) : clamped("does not fit", {}, true);
}

function entryOf(all, row, path, times) {
  const sum = (of) => all.reduce((bytes, v) => bytes + of(v), 0);
  return { all, row, path, times, first: all[0], follows: row?.follows ?? false, ruleText: row?.rule ?? all[0].ruleText, bytes: sum((v) => v.bytes), deviceBytes: sum((v) => v.deviceBytes ?? 0) };
}

/** What is asked of the table; all of it is in the address of the page. */
const asked = { search: "", kind: "", rule: "", flags: new Set(), sort: "", down: false, collapsed: true };

function tableView(holder, changed) {
  let entries = [];
  let active = 0;

  const search = make("input", { type: "search", id: "search", placeholder: "path, alias or pattern; /regex/", spellcheck: "false", autocomplete: "off", "aria-describedby": "hits" });
  const hits = make("p", { class: "note", id: "hits", "aria-live": "polite" });
  const option = ([value, text]) => make("option", { value }, text);
  const kinds = [...new Set(variables.map((v) => v.kind))];
  const kind = make("select", { id: "kind" }, [["", "all"], ...kinds.map((each) => [each, each])].map(option));
  const used = rules.filter((rule) => variables.some((v) => v.rule === rule)).sort((a, b) => a.number - b.number);
  const rule = make("select", { id: "rule" }, [["", "all"], ["none", "no rule matches"], ["follows", "not asked"], ...used.map((each) => [`${each.number}`, `${each.number}  ${each.pattern}`])].map(option));
  const collapsed = make("input", { type: "checkbox", id: "collapsed" });
  const flags = Object.entries(FLAGS).map(([name, test]) => {
    const chip = make("button", { type: "button", class: "chip", onclick: () => {
      if (!asked.flags.delete(name)) asked.flags.add(name);
      refresh();
    } }, `${name} `, make("span", { class: "tally" }, countText(variables.filter(test).length)));
    return { name, chip };
  });
  const clear = make("button", { type: "button", class: "quiet", id: "clear", onclick: () => {
    Object.assign(asked, { search: "", kind: "", rule: "", flags: new Set() });
    refresh();
    search.focus();
  } }, "Clear");

  const heads = COLUMNS.map((column) => {
    const button = make("button", { type: "button", onclick: () => {
      // Up, down, and then again the order of the model.
      if (asked.sort !== column.name) Object.assign(asked, { sort: column.name, down: false });
      else if (!asked.down) asked.down = true;
      else Object.assign(asked, { sort: "", down: false });
      refresh();
    } }, column.name);
    return make("th", { scope: "col", class: column.number ? "number" : "" }, button);
  });
  const body = make("tbody");
  const table = make("table", { role: "grid", tabindex: "0", id: "grid", "aria-label": "Variables. Up and down go from row to row, Enter chooses one." },
    make("colgroup", {}, COLUMNS.map(({ name }) => make("col", { class: `col-${name.replace(" ", "-")}` }))),
    make("thead", {}, make("tr", {}, heads)), body);
  const scroller = make("div", { class: "sideways", id: "table-scroll" }, table);

  function matching() {
    const tests = [...asked.flags].filter((name) => FLAGS[name]).map((name) => FLAGS[name]);
    if (asked.kind) tests.push((v) => v.kind === asked.kind);
    if (asked.rule === "none") tests.push((v) => !v.rule && !v.notAsked);
    else if (asked.rule === "follows") tests.push((v) => v.notAsked);
    else if (asked.rule) tests.push((v) => `${v.rule?.number}` === asked.rule);
    try {
      tests.push(searchTest(asked.search));
      search.removeAttribute("aria-invalid");
    } catch (error) {
      search.setAttribute("aria-invalid", "true");
      return { error: error.message };
    }
    return { found: variables.filter((v) => tests.every((test) => test(v))) };
  }

  function entriesOf(found) {
    if (!asked.collapsed) return found.map((v) => entryOf([v], null, v.name, 1));
    const groups = new Map();
    for (const v of found) (groups.get(v.row) ?? groups.set(v.row, []).get(v.row)).push(v);
    return [...groups].map(([row, all]) => {
      const times = rows[row].variables.length;
      return entryOf(all, rows[row], all.length === 1 ? all[0].name : rows[row].path, times);
    });
  }

  function refresh() {
    const { found, error } = matching();
    if (found) {
      entries = entriesOf(found);
      const column = COLUMNS.find(({ name }) => name === asked.sort);
      if (column) {
        const keyed = entries.map((entry) => [column.by(entry), entry]);
        const sign = asked.down ? -1 : 1;
        keyed.sort(([a], [b]) => sign * (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b)));
        entries = keyed.map(([, entry]) => entry);
      }
    }
    active = Math.max(0, entries.findIndex((entry) => entry.all.includes(chosen.variable)));
    const inRows = entries.length === found?.length ? "" : `, in ${counted(entries.length, "row")}`;
    hits.textContent = error ? `This is not a regex: ${error}` : `${countText(found.length)} of ${counted(variables.length, "variable")}${inRows}`;
    if (search.value !== asked.search) search.value = asked.search;
    [kind.value, rule.value, collapsed.checked] = [asked.kind, asked.rule, asked.collapsed];
    for (const { name, chip } of flags) chip.setAttribute("aria-pressed", `${asked.flags.has(name)}`);
    clear.hidden = !(asked.search || asked.kind || asked.rule || asked.flags.size);
    heads.forEach((head, i) => {
      if (COLUMNS[i].name === asked.sort) head.setAttribute("aria-sort", asked.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    table.setAttribute("aria-rowcount", `${entries.length + 1}`);
    scroller.scrollTop = 0;
    render();
    changed();
  }

  function rowNode(entry, i) {
    const is = entry.all.includes(chosen.variable);
    const line = make("tr", { id: `row-${i}`, "aria-rowindex": `${i + 2}`, "aria-selected": `${is}`, class: i === active ? "active" : "" },
      COLUMNS.map((column) => make("td", { role: "gridcell", class: column.number ? "number" : "" }, column.cell(entry))));
    line.dataset.entry = `${i}`;
    return line;
  }

  let rendered = ""; // which rows are in the document

  /** Puts the rows that show into the document; while the reader scrolls, only where those are others. */
  function render(scrolled = false) {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(entries.length, first + Math.ceil((scroller.clientHeight || 560) / ROW_HEIGHT) + 2 * SPARE_ROWS);
    if (scrolled && rendered === `${first} ${last}`) return;
    rendered = `${first} ${last}`;
    const space = (count) => {
      const filler = make("tr", { "aria-hidden": "true", class: "filler" }, make("td", { colspan: `${COLUMNS.length}` }));
      filler.style.height = `${count * ROW_HEIGHT}px`;
      return filler;
    };
    const nothing = make("tr", {}, make("td", { colspan: `${COLUMNS.length}`, class: "note" }, "No variable is like that."));
    body.replaceChildren(
      ...(first ? [space(first)] : []),
      ...(entries.length ? entries.slice(first, last).map((entry, i) => rowNode(entry, first + i)) : [nothing]),
      ...(last < entries.length ? [space(entries.length - last)] : []));
    table.setAttribute("aria-activedescendant", entries.length ? `row-${active}` : "");
  }

  function choose(i) {
    active = i;
    const { all } = entries[i];
    chooseVariable(all.includes(chosen.variable) ? chosen.variable : all[0], "table");
  }

  function reveal(i) {
    const [top, room] = [i * ROW_HEIGHT, scroller.clientHeight - 2 * ROW_HEIGHT];
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
  }

  body.addEventListener("click", (event) => {
    const line = event.target.closest("[data-entry]");
    if (line) choose(Number(line.dataset.entry));
  });
  table.addEventListener("keydown", (event) => {
    if (event.target !== table || !entries.length) return;
    const page = Math.floor(scroller.clientHeight / ROW_HEIGHT) - 2;
    const to = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: entries.length - 1 }[event.key];
    if (to !== undefined) {
      active = Math.min(entries.length - 1, Math.max(0, to));
      reveal(active);
      render();
    } else if (event.key === "Enter" || event.key === " ") choose(active);
    else return;
    event.preventDefault();
  });
  let pending = false;
  scroller.addEventListener("scroll", () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      render(true);
    });
  });
  search.addEventListener("input", () => {
    asked.search = search.value;
    refresh();
  });
  kind.addEventListener("change", () => {
    asked.kind = kind.value;
    refresh();
  });
  rule.addEventListener("change", () => {
    asked.rule = rule.value;
    refresh();
  });
  collapsed.addEventListener("change", () => {
    asked.collapsed = collapsed.checked;
    refresh();
  });

  holder.append(
    make("div", { class: "controls" }, make("label", { class: "grow" }, make("span", { class: "hidden-label" }, "Search "), search), make("label", {}, "Kind ", kind), data.checkpoint ? "" : make("label", { class: "narrowed" }, "Rule ", rule)),
    make("div", { class: "controls" }, make("span", { class: "chips", role: "group", "aria-label": "Only variables with" }, flags.map(({ chip }) => chip)), make("label", { class: "check" }, collapsed, " Repeated blocks in one row"), clear),
    hits, scroller);
  onChosen((by) => {
    const at = entries.findIndex((entry) => entry.all.includes(chosen.variable));
    if (at >= 0) active = at;
    if (at >= 0 && by !== "table" && by !== "device" && by !== "slice") reveal(at);
    render();
  });
  return refresh;
}
