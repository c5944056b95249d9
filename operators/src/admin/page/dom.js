
"use strict";

// The page's subject, and its latest answers.
let route = { limit: null, key: null, count: 100 };
const known = {
  status: null,
  received: 0,
  problem: null,
  details: null,
  detailsProblem: null,
  log: null,
  logProblem: null,
  logReceived: -Infinity,
};

// Elements. All text goes through `shown` and is set as text.

const byId = (id) => document.getElementById(id);

// Control characters, direction and formatting marks, line separators, and tags, as in the command line.
const UNSEEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff" +
    "\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]",
  "gu"
);

function shown(text) {
  return String(text).replace(UNSEEN, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);
}

// Sets a text only if it differs, because screen readers announce changes.
function put(node, text) {
  const next = shown(text);
  if (node.textContent !== next) node.textContent = next;
}

function putClass(node, name) {
  if (node.className !== name) node.className = name;
}

function element(name, attributes = {}, children = []) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") put(node, value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function button(label, act) {
  const node = element("button", { type: "button", text: label });
  node.addEventListener("click", act);
  return node;
}

// Terms and their descriptions: `[term, text, class]`.
function putFacts(list, facts) {
  while (list.children.length > facts.length) list.lastElementChild.remove();
  while (list.children.length < facts.length) {
    list.append(element("div", {}, [element("dt"), element("dd")]));
  }
  facts.forEach(([term, text, name = ""], at) => {
    const [dt, dd] = list.children[at].children;
    put(dt, term);
    put(dd, text);
    putClass(dd, name);
  });
}

// Announces an event, both visibly and to screen readers.
function say(text) {
  put(byId("said"), text);
}
