"use strict";

const place = id => document.getElementById(id);
const NOT_RUN = ["UNSUPPORTED", "UNAVAILABLE"];
let state = null, chosen = "";

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null && child !== undefined).map(child => child.nodeType ? child : String(child)));
  return made;
}

const digits = x => x >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)));
const us = ms => `${digits(ms * 1000)} µs`;

function bytes(n) {
  const unit = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => n >= size);
  return unit ? `${digits(n / unit[0])} ${unit[1]}` : `${n} B`;
}

function facts({count, cells, compiled, emulated, measured, kernel, backend}) {
  const rows = [], taken = cells.filter(cell => !NOT_RUN.includes(cell.status)).length;
  const add = (name, value, detail, ...commands) => rows.push([name, value, detail, commands]);
  if (kernel) add("checks", `right ${count.right} of ${count.tried}`, `${taken} cells that the kernel may take`);
  if (count.tried && !emulated) add("counts", "none", `a kernel of ${backend} has no compiled code to emulate: it is checked, and not counted`);
  if (emulated && emulated.bytes) {
    const over = `${digits(emulated.bytes / emulated.least)} × the least`;
    add("bytes", over, `${bytes(emulated.bytes)} of HBM at ${emulated.case} ${emulated.scheme}, counted in the emulator`, emulated.command);
  }
  if (compiled) {
    const at = `${compiled.case} ${compiled.scheme}, compiled for sm_90a`;
    if (compiled.reason) add("compiled code", "none", compiled.reason, ...compiled.commands);
    if (compiled.registers !== undefined) {
      add("registers", `${compiled.registers} a thread`, at, compiled.commands[0]);
      add("spills", `${compiled.spills} B of stack a thread`, at, compiled.commands[0]);
    }
    if (compiled.predicted_ms) {
      const range = compiled.predicted_ms.map(us).join(" to ");
      add("predicted", range, `${compiled.gpu}; eight of ten public kernels of its kind lie in such a range; ${compiled.calibration}`, compiled.commands[1]);
    }
    if (compiled.bound_ms) add("bound", us(compiled.bound_ms), `${compiled.limiter}, on ${compiled.gpu}`, compiled.commands[1]);
    for (const row of compiled.published || []) add(`${row.how} library`, us(row.ms), `${row.library} on ${row.gpu}`);
    if (compiled.published && !compiled.published.length) add("published library", "none", `no table has ${at}`);
  }
  for (const row of measured ? measured.times : []) {
    const text = row.ms === null ? row.status : us(row.ms) + (row.status === "OK" ? "" : `, ${row.status}`);
    add(`measured ${row.kernel}`, text, `${measured.device}, ${measured.case} ${measured.scheme} ${row.reason}`, measured.command);
  }
  place("facts").replaceChildren(...rows.map(([name, value, detail, commands]) => el("div", {},
    el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", {}, detail),
      ...commands.map(command => el("code", {}, command))))));
}

function source({source, emulated, faults, file}) {
  const lines = emulated ? emulated.lines : {}, counted = Object.keys(lines).length > 0;
  const heads = ["line", ...(counted ? ["bytes", "shared", "conflicts", "instructions"] : []), "source"];
  place("source-columns").replaceChildren(...heads.map(head => el("th", {scope: "col"}, head)));
  const rows = source.flatMap((text, index) => {
    const line = lines[index + 1] || {}, fault = faults[index + 1];
    const cells = counted ? [line.global_bytes && bytes(line.global_bytes), line.shared_bytes && bytes(line.shared_bytes),
      line.conflicts && `${digits(line.conflicts)} ×`, line.threads && digits(line.threads)] : [];
    const row = el("tr", fault ? {class: "fault"} : {}, el("th", {scope: "row"}, fault ? `✗ ${index + 1}` : index + 1),
      ...cells.map(cell => el("td", {class: "number"}, cell || "")), el("td", {class: "code"}, text));
    const reason = fault && el("tr", {class: "fault"}, el("td", {colspan: heads.length, class: "reason"}, `line ${index + 1}: ${fault}`));
    return fault ? [row, reason] : [row];
  });
  place("source").replaceChildren(...rows);
  place("source-note").textContent = !emulated ? "" : !counted ? `No line of ${file} is counted. ${emulated.command}`
    : "Bytes of global and of shared memory, turns of shared memory over those without bank conflicts, and instructions "
      + `of all threads, by line. ${emulated.command}`;
}

function bars({emulated, last}) {
  const levels = emulated ? emulated.levels : [], before = last ? last.levels : [];
  const same = last && emulated && last.case === emulated.case && last.scheme === emulated.scheme;
  place("bytes-note").textContent = !levels.length ? "No bytes are counted."
    : !last ? "No earlier save was right: there is nothing to compare with."
    : `Beside them those of save ${last.save}, the last that was right${same ? "" : `, at ${last.case} ${last.scheme}`}.`;
  const pairs = levels.flatMap(row => ["read", "written"].map(key => {
    const earlier = before.find(one => one.level === row.level);
    return {name: `${row.level}, ${key}`, now: row[key], earlier: last ? (earlier ? earlier[key] : 0) : null};
  })).filter(pair => pair.now || pair.earlier);
  const most = Math.max(...pairs.flatMap(pair => [pair.now, pair.earlier || 0]));
  const bar = (kind, value, text) => {
    const drawn = el("i", {class: kind, "aria-hidden": "true"});
    drawn.style.width = `${60 * value / most}%`;
    return el("span", {class: "bar"}, drawn, text);
  };
  place("bytes").replaceChildren(...pairs.map(({name, now, earlier}) => el("p", {}, name,
    bar("now", now, bytes(now)), earlier === null ? null : bar("then", earlier, `${bytes(earlier)} in save ${last.save}`))));
}

const word = ({status}) => !status ? "not tried" : status === "OK" ? "right" : NOT_RUN.includes(status) ? "not taken" : "wrong";

function grid({cells}) {
  const schemes = [...new Set(cells.map(cell => cell.scheme))], cases = [...new Set(cells.map(cell => cell.case))];
  const focused = document.activeElement && document.activeElement.id;
  place("grid-columns").replaceChildren(...["case", ...schemes].map(head => el("th", {scope: "col"}, head)));
  place("grid").replaceChildren(...cases.map(name => el("tr", {}, el("th", {scope: "row"}, name.replaceAll(",", ", ")),
    ...schemes.map(scheme => {
      const key = `${name} ${scheme}`, cell = cells.find(one => one.case === name && one.scheme === scheme);
      const button = el("button", {type: "button", id: key, class: word(cell).replace(" ", "-")}, word(cell));
      button.addEventListener("click", () => { chosen = key; told(); });
      return el("td", {}, button);
    }))));
  if (focused && place(focused) && focused.includes("=")) place(focused).focus();
  told();
}

function told() {
  const cell = state.cells.find(one => `${one.case} ${one.scheme}` === chosen);
  const parts = cell ? [chosen, word(cell), cell.reason, cell.command].filter(Boolean) : [];
  if (place("cell").textContent !== parts.join(": ")) place("cell").textContent = parts.join(": ");
}

function draw(next) {
  state = next;
  const verdict = {right: "✓ right so far", wrong: "✗ wrong"}[state.verdict] || "… judging";
  const done = state.verdict === "right" && !state.running ? "✓ right" : verdict;
  document.title = `${done} ${state.file}`;
  place("title").textContent = state.kernel ? `${state.file}: ${state.kernel}` : state.file;
  place("save").textContent = `save ${state.save} at ${state.time}, state ${state.version}${state.running ? ", at work" : ""}`;
  place("verdict").className = state.verdict;
  if (place("verdict").textContent !== done) place("verdict").textContent = done;
  if (place("sentence").textContent !== state.sentence) place("sentence").textContent = state.sentence;
  facts(state); source(state); bars(state); grid(state);
}

const events = new EventSource("events");
events.onmessage = event => draw(JSON.parse(event.data));
events.onerror = () => { place("save").textContent = "rooflab watch has ended, or does not answer: this is what it said last."; };
