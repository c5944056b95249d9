
// Tables that are updated in place, so that focus, selection and scroll position stay.

// A column has a title, and either a `text` function of a row, or it makes a node once and updates it.
// `{ title, text, name }` or `{ title, make, update, name }`
function makeTable(home, caption, columns, key, empty) {
  const heads = columns.map(({ title, name = "" }) =>
    element("th", { role: "columnheader", scope: "col", class: name, text: title })
  );
  const body = element("tbody", { role: "rowgroup" });
  const table = element("table", { role: "table" }, [
    element("caption", { class: "hidden", text: caption }),
    element("thead", { role: "rowgroup" }, [element("tr", { role: "row" }, heads)]),
    body,
  ]);
  const none = element("p", { class: "none", text: empty });
  // Not known before the first answer.
  none.hidden = true;
  const more = element("p", { class: "more" });
  home.append(table, none, more);
  const lines = new Map();
  return (rows, rest = "") => {
    keepFocus(home, () => update(body, lines, columns, rows, key));
    table.hidden = rows.length === 0;
    none.hidden = rows.length > 0 || rest !== "";
    put(more, rest);
  };
}

function update(body, lines, columns, rows, key) {
  const ids = rows.map(key);
  const wanted = new Set(ids);
  for (const [id, line] of lines) {
    if (!wanted.has(id)) {
      line.row.remove();
      lines.delete(id);
    }
  }
  let next = body.firstElementChild;
  rows.forEach((data, at) => {
    let line = lines.get(ids[at]);
    if (!line) {
      line = makeLine(columns);
      lines.set(ids[at], line);
    }
    line.data = data;
    line.updates.forEach((update) => update(data));
    if (line.row === next) next = next.nextElementSibling;
    else body.insertBefore(line.row, next);
  });
}

function makeLine(columns) {
  const line = { row: element("tr", { role: "row" }), updates: [], data: null };
  columns.forEach(({ title, text, make, update, name = "" }, at) => {
    const cell =
      at === 0
        ? element("th", { role: "rowheader", scope: "row", class: name, "data-label": title })
        : element("td", { role: "cell", class: name, "data-label": title });
    line.row.append(cell);
    if (make) {
      const node = make(() => line.data);
      cell.append(node);
      line.updates.push((data) => update(node, data));
    } else if (at === 0) {
      line.updates.push((data) => put(cell, text(data)));
    } else {
      // A separate node: on narrow screens the cell is a row with title and text.
      const node = element("span");
      line.updates.push((data) => {
        const words = text(data);
        put(node, words);
        if (words === "") cell.replaceChildren();
        else if (!cell.firstChild) cell.append(node);
      });
    }
  });
  return line;
}

// Focus follows a moved row; if its row is gone, the focus goes to the heading above.
function keepFocus(home, work) {
  const focused = document.activeElement;
  const within = focused !== null && home.contains(focused);
  work();
  if (!within || document.activeElement === focused) return;
  const target = focused.isConnected ? focused : home.querySelector("h2, h3");
  target?.focus({ preventScroll: true });
}

function linkColumn(title, text, href, name = "") {
  const update = (link, data) => {
    put(link, text(data));
    const to = href(data);
    if (link.getAttribute("href") !== to) link.setAttribute("href", to);
  };
  return { title, name, make: () => element("a"), update };
}

// Buttons: `[label, action for a row, whether a row has the button]`. The accessible name includes the row.
function buttonColumn(what, buttons) {
  const make = (data) => element("div", {}, buttons.map(([label, act]) => button(label, () => act(data()))));
  const update = (node, data) => {
    buttons.forEach(([label, , has = () => true], at) => {
      const one = node.children[at];
      one.hidden = !has(data);
      const words = `${label}: ${shown(what(data))}`;
      if (one.getAttribute("aria-label") !== words) one.setAttribute("aria-label", words);
    });
  };
  return { title: "", name: "actions", make, update };
}

// Slots in use out of the value, or units used of a rate's burst, as a bar and in numbers.
const useColumn = {
  title: "In use",
  make: () => element("span", {}, [element("meter", { min: 0, optimum: 0 }), element("span")]),
  update: (node, row) => {
    const [bar, numbers] = node.children;
    const [used, most] = "burst" in row ? [row.burst - row.remaining, row.burst] : [row.held, row.max];
    const text = `${row.partial ? "at least " : ""}${used} of ${most}`;
    put(numbers, text);
    bar.max = Math.max(1, most);
    // Above this value the bar has another colour.
    bar.high = bar.max * 0.99;
    bar.value = used;
    bar.setAttribute("aria-label", text);
  },
};
