const place = id => document.getElementById(id);
const NOT_RUN = ["UNSUPPORTED", "UNAVAILABLE"];
let state = null, chosen = "";

const { el, digits, bytes } = rooflab;
const us = ms => `${digits(ms * 1000)} µs`;

// An unchanged text stays as it is, for it would be read out again.
const say = (id, text) => { if (place(id).textContent !== text) place(id).textContent = text; };

function facts({cells, compiled, emulated, measured, kernel, backend}) {
  const rows = [], commands = new Set(), count = kind => cells.filter(cell => word(cell) === kind).length;
  const add = (name, value, detail, command = "") => rows.push([name, value, detail]) && commands.add(command);
  const right = count("right"), wrong = count("wrong"), left = count("not tried");
  if (kernel) add("checks", `right ${right} of ${right + wrong + left}`, `${wrong} wrong, ${left} not tried`);
  if (right + wrong && !emulated) add("counts", "none", `A kernel of ${backend} has no compiled code to emulate.`);
  if (emulated && emulated.bytes) {
    const detail = `${bytes(emulated.bytes)} of HBM, counted in the emulator, ${emulated.case} ${emulated.scheme}`;
    add("bytes", `${digits(emulated.bytes / emulated.least)} × the least`, detail, emulated.command);
  }
  if (compiled) {
    const at = `${compiled.case} ${compiled.scheme}`, on = `on ${compiled.gpu}, ${at}`;
    const {registers, spills, predicted_ms: range, bound_ms: bound, commands: [code, time]} = compiled;
    if (compiled.reason) add("compiled code", "none", compiled.reason, code);
    if (registers !== undefined) add("registers", `${registers} a thread`, `compiled for sm_90a, ${at}`, code);
    if (spills !== undefined) add("spills", `${spills} B a thread`, `of stack, ${at}`, code);
    const name = "predicted, for 8 of 10 kernels";
    if (range) add(name, range.map(us).join(" to "), `${on}; ${compiled.calibration}`, time);
    if (bound) add("bound", us(bound), `${compiled.limiter}, ${on}`, time);
    for (const {s, library, gpu} of compiled.published) add(`published, on ${gpu}`, us(s * 1000), `${library}, ${at}`);
    if (!compiled.published.length) add("published", "none", `no table has ${at}`);
  }
  for (const {kernel: name, latency_median_ms: ms, status, reason} of measured ? measured.times : []) {
    const detail = `${status}, on this ${measured.device}, ${measured.case} ${measured.scheme} ${reason}`;
    add(`measured ${name}`, ms === null ? "none" : us(ms), detail, measured.command);
  }
  place("facts").replaceChildren(...rows.map(([name, value, detail]) => el("div", {},
    el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", {}, detail)))));
  place("commands").replaceChildren(...[...commands].map(command => el("code", {}, command)));
}

function source({source: texts, emulated, faults, file}) {
  const lines = emulated ? emulated.lines : {}, counted = Object.keys(lines).length > 0;
  const heads = ["line", ...(counted ? ["bytes", "shared", "conflicts", "instructions"] : []), "source"];
  place("source-columns").replaceChildren(...heads.map(text =>
    el("th", {scope: "col", text, class: text === "source" ? "" : "n"})));
  place("source").replaceChildren(...texts.flatMap((text, index) => {
    const line = lines[index + 1] || {}, fault = faults[index + 1], kind = {class: fault ? "fault" : ""};
    const cells = [line.global_bytes && bytes(line.global_bytes), line.shared_bytes && bytes(line.shared_bytes),
      line.conflicts && `${digits(line.conflicts)} ×`, line.threads && digits(line.threads)];
    const row = el("tr", kind, el("th", {scope: "row"}, `${fault ? "✗ " : ""}${index + 1}`),
      ...(counted ? cells : []).map(cell => el("td", {class: "n"}, cell || "")), el("td", {class: "code"}, text));
    const reason = el("td", {colspan: heads.length}, el("span", {class: "reason"}, fault || ""));
    return fault ? [row, el("tr", kind, reason)] : [row];
  }));
  say("source-note", emulated && !counted ? `No line of ${file} is counted.` : "");
}

function bars({emulated, last}) {
  const levels = emulated ? emulated.levels : [];
  say("bytes-note", !levels.length ? "No bytes are counted." : !last ? "No earlier save was right, to compare with."
    : `Below each stands that of save ${last.save}, the last one that was right, at ${last.case} ${last.scheme}.`);
  const earlier = level => (last ? last.levels : []).find(row => row.level === level) || {read: 0, written: 0};
  const rows = levels.flatMap(row => ["read", "written"].flatMap(key => {
    const name = `${row.level}, ${key}`, now = row[key], then = earlier(row.level)[key];
    return !now && !then ? [] : [[name, now], ...(last ? [[`in save ${last.save}`, then, "var(--soft)"]] : [])];
  }));
  place("bytes").replaceChildren(rows.length ? rooflab.bars("Bytes by level", rows, bytes) : "");
}

const word = cell => !cell.status ? "not tried" : NOT_RUN.includes(cell.status) ? "not taken"
  : cell.status === "OK" ? "right" : "wrong";

function grid({cells}) {
  const schemes = [...new Set(cells.map(cell => cell.scheme))], cases = [...new Set(cells.map(cell => cell.case))];
  const focused = document.activeElement.id;
  const button = cell => {
    const id = `${cell.case} ${cell.scheme}`, click = () => { chosen = id; tell(); };
    return el("button", {type: "button", id, class: word(cell), text: word(cell), on: {click}});
  };
  const rows = cases.map(name => [name.replaceAll(",", ", ").replaceAll("-", "‑"),
    ...cells.filter(cell => cell.case === name).map(button)]);
  place("grid").replaceChildren(rooflab.table("Verdicts", ["case", ...schemes], rows).firstChild);
  if (focused && place(focused)) place(focused).focus({preventScroll: true});
  tell();
}

function tell() {
  const cell = state.cells.find(one => `${one.case} ${one.scheme}` === chosen);
  say("cell", cell ? [chosen, word(cell), cell.reason, cell.command].filter(Boolean).join(": ")
    : "Press a cell to see its reason and its command.");
}

function draw(event) {
  state = JSON.parse(event.data);
  const {verdict, running, file, kernel, save, time, version, sentence} = state;
  const done = verdict === "wrong" ? "✗ wrong" : verdict ? `✓ right${running ? " so far" : ""}` : "… judging";
  document.title = `${done} ${file}`;
  say("title", kernel ? `${file}: ${kernel}` : file);
  say("save", `save ${save} at ${time}, state ${version}${running ? ", at work" : ""}`);
  place("verdict").className = verdict;
  for (const [id, text] of [["verdict", done], ["sentence", sentence]]) say(id, text);
  for (const part of [facts, source, bars, grid]) part(state);
}

const events = new EventSource("events");
events.onmessage = draw;
events.onerror = () => say("save", "rooflab watch has ended, or does not answer. Below is what it said last.");
