
// Changes: a dialog that describes the effect.

const KINDS = {
  set: {
    title: (target) => `Set the value of ${target}`,
    fields: ["value", "burst", "for"],
    body: (form) => ({ value: Number(form.value.value), ...burstOf(form), for_ms: Number(form.for.value) }),
    confirm: (form) => `Set to ${form.value.value || "..."} for ${chosen(form.for)}`,
    will: willSet,
  },
  share: {
    title: (target) => `Set the share of ${target}`,
    fields: ["share", "for"],
    body: (form) => ({ share: Number(form.share.value), for_ms: Number(form.for.value) }),
    confirm: (form) => `Set to ${form.share.value || "..."} for ${chosen(form.for)}`,
    will: (about, form) =>
      `For ${chosen(form.for)} the tenant gets ${form.share.value || "..."} times the slot-seconds of a tenant with a share of 1, ` +
      "while both wait: also its requests that wait now. Then the shares of its requests hold again.",
  },
  mode: {
    title: (target) => `Set the mode of ${target}`,
    fields: ["mode", "for"],
    body: (form) => ({ mode: form.mode.value, for_ms: Number(form.for.value) }),
    confirm: (form) => `Set to ${form.mode.value} for ${chosen(form.for)}`,
    will: willMode,
  },
  pause: {
    title: (target) => `Pause ${target}`,
    fields: ["for"],
    length: "900000",
    body: (form) => ({ for_ms: Number(form.for.value) }),
    confirm: (form) => `Pause for ${chosen(form.for)}`,
    will: ({ limit }, form) =>
      `For ${chosen(form.for)} nobody is admitted: newcomers` +
      (limit?.waiting > 0 ? ` and ${count(limit.waiting, "waiting request")}` : "") +
      " are refused with 503 and Retry-After." +
      (limit?.held > 0 ? ` ${count(limit.held, "holder")} may finish.` : ""),
  },
  unset: {
    title: (target) => `Remove the overrides of ${target}`,
    fields: [],
    body: () => ({}),
    confirm: () => "Remove",
    will: ({ target, limit, seen }) =>
      (seen.length > 1 ? `All ${seen.length} are removed. ` : "") +
      (target.key
        ? "The value of the limit holds for this key again, at once, on all replicas."
        : target.tenant
        ? "The shares of the tenant's requests hold again, at once, on all replicas."
        : `What is declared holds again at once, on all replicas${limit ? `: ${declaredText(limit)}` : ""}. ` +
          "Overrides of single keys and tenants stay."),
  },
  revoke: {
    title: (name) => `Revoke ${name}`,
    fields: [],
    body: (form, { revoked }) => revoked,
    confirm: () => "Revoke",
    will: () =>
      "Responses end with an error, and their slots are released. Jobs that hold a permit are told, and keep their slots until " +
      "they stop. Nothing keeps the caller from coming back: pause the limit first, or set the value of the key to 0.",
  },
  resume: {
    title: (target) => `Resume ${target}`,
    fields: [],
    body: () => ({}),
    confirm: () => "Resume",
    will: () =>
      "The whole limit holds again at once, and requests that wait are admitted. If the upstream still refuses, its next " +
      "answer pauses the key again.",
  },
};

let open = null;

function chosen(select) {
  return select.selectedOptions[0].textContent;
}

// Sends a burst only if the operator entered a value.
function burstOf(form) {
  return form.burst.value === "" ? {} : { burst: Number(form.burst.value) };
}

function declaredText(limit) {
  return valueText(limit.declared_max, limit);
}

function willSet({ target, limit, max }, form) {
  if (form.value.value === "") return "";
  const [value, time] = [Number(form.value.value), chosen(form.for)];
  const { burst } = burstOf(form);
  const atOnce = burst === undefined ? "" : `, ${burst.toLocaleString("en")} of them at once`;
  const unit = isRate(limit) ? `start ${count(value, "request")} in ${duration(limit.period_ms)}${atOnce}` : `hold ${count(value, "slot")}`;
  const all = limit?.shared ? "all callers together" : "each key without an override of its own";
  const who = target.key ? "this key" : all;
  const parts = [`For ${time} ${who} may ${unit}.`];
  if (value === 0) parts.push("It is blocked: it admits nobody.");
  else if (value > max) parts.push("Requests that wait are admitted at once.");
  else if (value < max) parts.push("No slot is taken away, and nobody is admitted until there is room.");
  if (limit) parts.push(target.key ? "Then the value of the limit holds again." : `Then ${declaredText(limit)} holds again.`);
  return parts.join(" ");
}

function willMode({ limit }, form) {
  const then = `For ${chosen(form.for)}`;
  if (form.mode.value === "off") return `${then} everybody is admitted, and nothing is counted.`;
  if (form.mode.value === "shadow") return `${then} everybody is admitted. Requests that would be refused are logged.`;
  return `${then} the limit is enforced` + (limit ? `: ${valueText(limit.max, limit)}.` : ".");
}

// `about`: the target, its known state, and the facts to display.
function openChange(kind, about) {
  open = { kind, ...about };
  const form = byId("change");
  const { title, fields, length } = KINDS[kind];
  put(byId("dialog-title"), title(about.name));
  putFacts(byId("dialog-now"), about.facts);
  for (const field of ["value", "share", "burst", "mode", "for"]) {
    byId(`field-${field}`).hidden = !fields.includes(field) || (field === "burst" && !isRate(about.limit));
  }
  form.reset();
  if (length) form.for.value = length;
  form.value.required = fields.includes("value");
  form.share.required = fields.includes("share");
  if (fields.includes("share")) form.share.value = about.share;
  form.value.min = about.target?.key && !isRate(about.limit) ? 0 : 1;
  form.value.max = isRate(about.limit) ? 1000000000 : 1000000;
  if (fields.includes("value")) [form.value.value, form.burst.value] = [about.max ?? "", about.burst ?? ""];
  put(byId("refused"), "");
  describe();
  byId("dialog").showModal();
}

function describe() {
  const form = byId("change");
  const { will, confirm } = KINDS[open.kind];
  put(byId("will"), will(open, form));
  put(byId("confirm"), confirm(form));
}

// Revokes one permit, a key's permits, or a replica's permits.
function openRevoke(name, revoked, facts) {
  openChange("revoke", { name, revoked, facts });
}

// The declared value of a limit or key, and the overrides on top.
function aboutTarget(target, name, limit, key = null) {
  const overrides = overridesOf(target);
  const facts = [];
  if (limit && !target.tenant) facts.push(["Declared", declaredText(limit)]);
  if (target.key) {
    overridesOf({ limit: target.limit }).forEach((one) => facts.push(["Of the limit", overrideText(one, limit)]));
  }
  overrides.forEach((one) => facts.push(["Override", overrideText(one, limit)]));
  if (overrides.length === 0) facts.push(["Override", "none"]);
  const max = key ? key.max : limit?.max;
  const burst = overrides.find(({ setting }) => setting === "value")?.burst;
  return { target, name, limit, max, burst, facts, seen: overrides.map((one) => one.token) };
}

function overrideText(one, limit) {
  return `${settingText(one, limit)}, by ${one.author} (${one.reason}), ends in ${duration(endsIn(one))}`;
}

async function submitChange(event) {
  event.preventDefault();
  const form = byId("change");
  const { kind, target, seen } = open;
  const order = { do: kind, ...target, ...KINDS[kind].body(form, open), reason: form.reason.value };
  if (seen) order.seen = seen;
  const confirm = byId("confirm");
  confirm.disabled = true;
  put(byId("refused"), "");
  try {
    const outcome = await send("api/changes", order);
    byId("dialog").close();
    say(outcomeText(outcome));
  } catch (problem) {
    // Without an answer of the service or of the store, the order may have been carried out.
    const isKnown = problem.kind && problem.kind !== "unavailable";
    const next = problem.kind === "conflict" ? ". Cancel, and look at it again." : "";
    const text = `${problem.message}${next}`;
    put(byId("refused"), isKnown ? `Not changed: ${text}` : `It may have been changed: ${text}. Cancel, and look at it again.`);
  } finally {
    confirm.disabled = false;
    logIsOld();
    refresh();
  }
}

byId("change").addEventListener("submit", submitChange);
byId("change").addEventListener("input", describe);
byId("cancel").addEventListener("click", () => byId("dialog").close());
