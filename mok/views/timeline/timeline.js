// The timeline: draws a trace on one canvas, in a notebook (anywidget), on a local page, or inside an offline report.
//
// Nothing is loaded and nothing bundled: this file is what runs. Times are nanoseconds since the trace's first span. A "row" is one line of spans that do not overlap; a lane has one or
// more. Text from a trace is only ever set as textContent or drawn: names are hostile.

const EMPTY = 255; // the key of a tile's pixel without any span
const NO_INT = -(2 ** 31); // "none" in an int32 argument column
const GUTTER = 176; // px for lane labels
const RULER = 30;
const WAIT_MS = 5000; // then Python counts as busy or gone
const LISTED = 200; // rows of a table

// ---- small things, time, text

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** Text with control and direction characters made visible: a name cannot hide or reorder what is around it. */
function plain(text) {
	return String(text).replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
		.replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) => `\u27e8${c.charCodeAt(0).toString(16)}\u27e9`);
}

/** An element; children are nodes or text, `on...` attributes are listeners. */
function el(tag, attributes = {}, ...children) {
	const node = document.createElement(tag);
	for (const [name, value] of Object.entries(attributes)) {
		if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
		else if (value !== null && value !== undefined) node.setAttribute(name, value);
	}
	node.append(...children.map((child) => (child instanceof Node ? child : plain(child))));
	return node;
}

const button = (label, onclick, title, more) => el("button", { type: "button", title, onclick, ...more }, label);

const UNITS = [["s", 1e9], ["ms", 1e6], ["\u00b5s", 1e3], ["ns", 1]];

const unitOf = (ns) => UNITS.find(([, size]) => Math.abs(ns) >= size) ?? UNITS[3];

function timeText(ns, digits = 4) {
	const [unit, size] = unitOf(ns);
	return unit === "ns" ? `${Math.round(ns)} ns` : `${Number((ns / size).toPrecision(digits))} ${unit}`;
}

/** Exact time since the first span, as far as it matters beside the window's length. */
function momentText(ns, window) {
	const [unit, size] = unitOf(Math.max(Math.abs(ns), 1));
	const decimals = clamp(Math.ceil(Math.log10(size) - Math.log10(Math.max(window / 1000, 1))), 0, 9);
	return `${(ns / size).toFixed(decimals).replace(/^-0$/, "0")} ${unit}`;
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
	const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
	return power * (least <= power ? 1 : least <= 2 * power ? 2 : least <= 5 * power ? 5 : 10);
}

/** First place in values[low, high) that is not below `wanted`. */
function lowerBound(values, wanted, low, high) {
	while (low < high) {
		const middle = (low + high) >>> 1;
		if (values[middle] < wanted) low = middle + 1; else high = middle;
	}
	return low;
}

function rgb(hex) {
	return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const mix = (a, b, share) => a.map((value, i) => Math.round(value * share + b[i] * (1 - share)));
const isDark = ([r, g, b]) => 0.3 * r + 0.59 * g + 0.11 * b < 110;
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

// ---- channels: how Python is asked

/** Asks over a widget's comm. Answers carry the question's `seq`; one that comes after its time-out is still taken. */
function widgetChannel(model) {
	const open = new Map();
	let last = 0;
	model.on("msg:custom", (answer, buffers) => {
		const waiting = open.get(answer.seq);
		if (!waiting) return;
		open.delete(answer.seq);
		channel.onstate("");
		const bytes = (buffers ?? []).map((part) => new Uint8Array(part.buffer ?? part, part.byteOffset ?? 0, part.byteLength));
		waiting(answer, bytes);
	});
	const gone = "disconnected: Python does not answer; the last view stays", manager = model.widget_manager;
	const kernelState = () => (manager?.kernel?.status === "busy" ? "Python is busy; the last view stays" : gone);
	const channel = {
		onstate: () => {},
		ask(request) {
			const seq = ++last;
			return new Promise((resolve, reject) => {
				open.set(seq, (answer, bytes) => (answer.error ? reject(new Error(answer.error)) : resolve([answer, bytes])));
				setTimeout(() => open.has(seq) && channel.onstate(kernelState()), WAIT_MS);
				try { model.send({ ...request, seq }); } catch { channel.onstate(gone); }
			});
		},
		alive: () => !(manager && "kernel" in manager && (!manager.kernel || manager.kernel.isDisposed)),
	};
	return channel;
}

const TYPES = { f64: Float64Array, f32: Float32Array, i32: Int32Array, u32: Uint32Array, u16: Uint16Array, i16: Int16Array,
	u8: Uint8Array, i8: Int8Array };

/** A typed array over bytes that may lie at an odd address. */
function typed(type, bytes) {
	const Type = TYPES[type];
	const fits = bytes.byteOffset % Type.BYTES_PER_ELEMENT === 0;
	return fits ? new Type(bytes.buffer, bytes.byteOffset, bytes.byteLength / Type.BYTES_PER_ELEMENT) : new Type(bytes.slice().buffer);
}

/** Fetches whole columns, all pieces at once. */
async function fetchColumns(channel, columns) {
	return Object.fromEntries(await Promise.all(columns.map(async (column) => {
		const whole = new Uint8Array(column.length * TYPES[column.type].BYTES_PER_ELEMENT);
		const pieces = [];
		for (let from = 0; from < whole.length; from += 4 << 20) pieces.push(channel.ask({ ask: "column", name: column.name, from }));
		for (const [answer, [bytes]] of await Promise.all(pieces)) whole.set(bytes, answer.from);
		return [column.name, { values: typed(column.type, whole), table: column.table }];
	})));
}

// ---- stores: where spans come from

/** Spans in typed arrays, by (row, start): everything is answered here, without Python. */
class InlineStore {
	constructor(header, columns) {
		this.header = header;
		this.first = columns.row_first.values;
		this.start = columns.start.values;
		this.dur = columns.dur.values;
		this.name = columns.name.values;
		this.names = columns.name.table;
		this.key = columns.key.values;
		this.parent = columns.parent?.values ?? [];
		this.twin = columns.twin?.values;
		this.ids = columns.id?.values;
		this.crowded = new Set(header.crowded);
		this.args = {};
		this.lit = null;
		this.laneOfRow = new Array(header.num_rows);
		for (const lane of header.lanes) for (let k = 0; k < lane.rows; k++) this.laneOfRow[lane.first + k] = lane;
	}

	addArguments(columns) {
		for (const [name, column] of Object.entries(columns)) this.args[name.slice(4)] = column;
	}

	nameOf(i) { return this.name[i] < 0 ? "unnamed" : this.names[this.name[i]]; }
	id(i) { return this.ids ? this.ids[i] : i; }
	place(id) {
		if (!this.ids) return id;
		if (!this.places) {
			this.places = new Uint32Array(this.ids.length);
			this.ids.forEach((value, i) => { this.places[value] = i; });
		}
		return this.places[id];
	}
	rowOf(i) {
		let low = 0, high = this.first.length - 1;
		while (low < high) { const middle = (low + high + 1) >>> 1; if (this.first[middle] <= i) low = middle; else high = middle - 1; }
		return low;
	}

	/** [first, last) of a row's spans that may touch [t0, t1). */
	range(row, t0, t1) {
		const low = this.first[row], high = this.first[row + 1];
		const begin = this.crowded.has(row) ? low : Math.max(low, lowerBound(this.start, t0, low, high) - 1);
		return [begin, lowerBound(this.start, t1, begin, high)];
	}

	want() {}

	paintRow(painter, row, y, height, hidden) {
		const [begin, end] = this.range(row, painter.t0, painter.t1);
		painter.spans(this, begin, end, y, height, hidden);
	}

	async at(row, t, within, hidden) {
		const [begin, end] = this.range(row, t - within, t + within + 1);
		let best = -1, away = Infinity;
		for (let i = begin; i < end; i++) {
			if (hidden.has(this.key[i])) continue;
			const gap = Math.max(this.start[i] - t, t - this.start[i] - this.dur[i], 0);
			if (gap <= within && gap < away) { away = gap; best = i; }
		}
		return best < 0 ? null : this.id(best);
	}

	short(i) {
		const row = this.rowOf(i), lane = this.laneOfRow[row];
		return { id: this.id(i), name: this.nameOf(i), category: this.category(i), lane: lane.lane, row, start: this.start[i], dur: this.dur[i] };
	}
	category(i) { return this.header.by === "category" ? this.header.keys[this.key[i]].name : ""; }

	argument(column, i) {
		const value = column.values[i];
		if (column.table) return value < 0 ? null : column.table[value];
		return Number.isNaN(value) || (value === NO_INT && column.values instanceof Int32Array) ? null : value;
	}

	async facts(id) {
		const i = this.place(id);
		const args = Object.entries(this.args).map(([name, column]) => [name, this.argument(column, i)]).filter((pair) => pair[1] !== null);
		const start_ns = (BigInt(this.header.origin_ns) + BigInt(Math.round(this.start[i]))).toString();
		const flows = this.flows(i).map((pair) => pair.map((k) => this.short(k)));
		return { ...this.short(i), start_ns, args, flows, twin: this.twin?.[i] >= 0 ? this.short(this.twin[i]) : null };
	}

	/** Arrows as in facts.py: back to the causes, on to the first consequences. */
	flows(i) {
		const arrows = [], children = (of, most) => {
			const found = [];
			for (let k = 0; k < this.parent.length && found.length < most; k++) if (this.parent[k] === of) found.push(k);
			return found;
		};
		for (let to = i; this.parent[to] >= 0 && arrows.length < 3; to = this.parent[to]) arrows.push([this.parent[to], to]);
		const next = children(i, 20).sort((a, b) => this.start[a] - this.start[b]);
		arrows.push(...next.map((k) => [i, k]));
		if (next.length) arrows.push(...children(next[0], 1).map((k) => [next[0], k]));
		return arrows;
	}

	async step(id, by, hidden) {
		const i = this.place(id), row = this.rowOf(i);
		for (let k = i + by; k >= this.first[row] && k < this.first[row + 1]; k += by) if (!hidden.has(this.key[k])) return this.id(k);
		return null;
	}

	/** Lights what matches; true if there is anything to light. */
	light(test) {
		this.lit = new Uint8Array(this.start.length);
		let count = 0;
		for (let i = 0; i < this.lit.length; i++) if (test(i)) { this.lit[i] = 1; count++; }
		return count;
	}

	async search(pattern, id, by) {
		if (pattern !== this.pattern) {
			this.pattern = pattern;
			this.lit = null;
			if (pattern) {
				const rule = new RegExp(pattern, "i");
				const hits = (table) => table.map((text) => rule.test(text));
				const named = hits(this.names), keyed = hits(this.header.keys.map((key) => key.name));
				const texts = Object.values(this.args).filter((column) => column.table).map((column) => [column.values, hits(column.table)]);
				this.count = this.light((i) => named[this.name[i]] || keyed[this.key[i]] || texts.some(([values, hit]) => hit[values[i]]));
				this.hits = this.byTime();
			}
		}
		if (!this.lit || !this.hits.length) return { count: 0, id: null };
		const t = id === null ? -Infinity : this.start[this.place(id)];
		const now = id === null ? -1 : this.hits.indexOf(this.place(id));
		let next = now >= 0 ? now + by : this.hits.findIndex((k) => this.start[k] >= t) - (by < 0 ? 1 : 0);
		next = (next + this.hits.length) % this.hits.length;
		return { count: this.count, id: this.id(this.hits[next]), number: next + 1 };
	}
	byTime() {
		const found = [];
		this.lit.forEach((on, i) => { if (on) found.push(i); });
		return Uint32Array.from(found).sort((a, b) => this.start[a] - this.start[b] || a - b);
	}

	async lightArguments(wanted) {
		this.pattern = null;
		const pairs = Object.entries(wanted);
		if (!pairs.length) { this.lit = null; return { count: 0 }; }
		for (const [name] of pairs) if (!this.args[name]) throw new Error(`no span has an argument "${name}"`);
		const same = ([name, value], i) => String(this.argument(this.args[name], i)) === String(value);
		return { count: this.light((i) => pairs.every((pair) => same(pair, i))) };
	}

	async table(t0, t1, rows, hidden) {
		const totals = new Map(), listed = [];
		let count = 0;
		for (const row of rows) {
			const [begin, end] = this.range(row, t0, t1);
			for (let i = begin; i < end; i++) {
				if (hidden.has(this.key[i]) || (this.start[i] + this.dur[i] <= t0 && this.start[i] < t0)) continue;
				count++;
				const name = this.nameOf(i), which = `${this.key[i]} ${name}`;
				if (!totals.has(which)) totals.set(which, { name, category: this.category(i), count: 0, inside: 0, mean: 0, longest: 0 });
				const total = totals.get(which);
				total.count++;
				total.inside += Math.max(0, Math.min(this.start[i] + this.dur[i], t1) - Math.max(this.start[i], t0));
				total.mean += (this.dur[i] - total.mean) / total.count;
				total.longest = Math.max(total.longest, this.dur[i]);
				listed.push(i);
			}
		}
		listed.sort((a, b) => this.start[a] - this.start[b]);
		const sorted = [...totals.values()].sort((a, b) => b.inside - a.inside);
		return { totals: sorted.slice(0, LISTED), count, spans: listed.slice(0, LISTED).map((i) => this.short(i)) };
	}
}

/** Spans that stay in Python: tiles of what is in sight, single spans where they are few. The last answer is kept and drawn. */
class RemoteStore {
	constructor(header, channel, redraw) {
		this.header = header;
		this.channel = channel;
		this.redraw = redraw;
		this.tile = null;
		this.asked = "";
		this.anyLit = false;
	}

	/** Asks for what `view` shows and an eighth more on each side, unless the last question was the same. */
	want(view, rows, hidden) {
		const length = view.t1 - view.t0, margin = length / 8;
		const covered = this.tile && !this.stale && this.tile.t0 <= view.t0 && this.tile.t1 >= view.t1 && rows.every((row) => this.tile.lines.has(row))
			&& (this.tile.exact || (this.tile.t1 - this.tile.t0) / this.tile.width <= 1.3 * (length / view.width));
		if (covered) return;
		const t0 = Math.floor(Math.max(-length, view.t0 - margin)), t1 = Math.ceil(Math.max(view.t1 + margin, t0 + 1));
		const request = { ask: "tile", t0, t1, width: Math.round(view.width * 1.25), rows: runs(rows), hidden: [...hidden] };
		const question = JSON.stringify(request);
		if (question === this.asked) return;
		this.asked = question;
		if (this.waiting) { this.next = request; return; } // one question at a time
		this.send(request);
	}

	async send(request) {
		this.waiting = true;
		const stale = this.stale;
		try {
			const begun = performance.now();
			const [answer, buffers] = await this.channel.ask(request);
			this.lastAnswer = { ms: performance.now() - begun, bytes: buffers.reduce((sum, part) => sum + part.length, 0) };
			this.take(answer, buffers);
			if (this.stale === stale) this.stale = null;
		} catch { this.asked = ""; }
		this.waiting = false;
		const next = this.next;
		this.next = null;
		if (next) this.send(next);
		this.redraw();
	}

	take(answer, buffers) {
		const lines = new Map();
		for (let k = 0; k < answer.rows.length; k += 2) for (let j = 0; j < answer.rows[k + 1]; j++) lines.set(answer.rows[k] + j, lines.size);
		const tile = { ...answer, lines };
		if (answer.count === undefined) [tile.key, tile.share, tile.litKey, tile.litShare] = buffers;
		else tile.exact = this.exactStore(answer, buffers, lines);
		this.tile = tile;
	}

	/** Single spans as a small inline store, for the painter. */
	exactStore(answer, [start, dur, row, id, name, key, lit], lines) {
		const rows = typed("u32", row), first = new Uint32Array(this.header.num_rows + 1);
		for (const r of rows) first[r + 1]++;
		for (let r = 0; r < this.header.num_rows; r++) first[r + 1] += first[r];
		const values = (type, bytes, table) => ({ values: typed(type, bytes), table });
		const columns = { row_first: { values: first }, start: values("f64", start), dur: values("f64", dur), name: values("u32", name, answer.names),
			key: values("u8", key), id: values("u32", id) };
		const store = new InlineStore({ ...this.header, lanes: [] }, columns);
		store.lit = this.anyLit ? lit : null;
		return store;
	}

	refresh() { this.stale = {}; this.asked = ""; this.redraw(); }
	paintRow(painter, row, y, height, hidden) {
		const line = this.tile?.lines.get(row);
		if (line === undefined) return;
		if (this.tile.exact) this.tile.exact.paintRow(painter, row, y, height, hidden);
		else painter.tile(this.tile, line, y, height, hidden);
	}
	async ask(request) { return (await this.channel.ask(request))[0]; }
	async at(row, t, within, hidden) { return (await this.ask({ ask: "at", row, t: Math.round(t), within: Math.ceil(within), hidden: [...hidden] })).id; }
	async facts(id) { return (await this.ask({ ask: "facts", id })).facts; }
	async step(id, by, hidden) { return (await this.ask({ ask: "step", id, by, hidden: [...hidden] })).id; }
	async search(pattern, id, by) {
		const answer = await this.ask({ ask: "search", pattern, id: id ?? -1, by });
		this.anyLit = pattern !== "";
		this.refresh();
		return answer;
	}
	async lightArguments(wanted) {
		const answer = await this.ask({ ask: "light", arguments: wanted });
		this.anyLit = Object.keys(wanted).length > 0;
		this.refresh();
		return answer;
	}
	async table(t0, t1, rows, hidden) {
		return this.ask({ ask: "table", t0: Math.floor(t0), t1: Math.max(Math.ceil(t1), Math.floor(t0) + 1), rows: runs(rows), hidden: [...hidden] });
	}
}

/** Row numbers as [first, count, first, count, ...]. */
function runs(rows) {
	const found = [];
	for (const row of [...rows].sort((a, b) => a - b)) {
		const n = found.length;
		if (n && found[n - 2] + found[n - 1] === row) found[n - 1]++;
		else found.push(row, 1);
	}
	return found;
}

// ---- layout of lanes

const ROW_PX = { thread: 14, stream: 18, counter: 36 };
const GROUP_PX = 20;

/** Lines of the page from top to bottom: group headings and lanes, each with its y and height in px. */
function layOut(header, folded, available, tall) {
	let many = 0, rest = 0;
	const hidden = (lane) => prefixes(lane.path).some((key) => folded.has(key));
	for (const lane of header.lanes) {
		if (hidden(lane)) continue;
		if (["sm", "role"].includes(lane.kind)) many += lane.rows; else rest += lane.rows * ROW_PX[lane.kind];
	}
	const fit = clamp(Math.floor((available - Math.min(rest, available / 2) - 60) / many), 3, 14), heights = { ...ROW_PX, sm: fit, role: fit };
	const entries = [], counts = new Map();
	for (const lane of header.lanes) prefixes(lane.path).forEach((key) => counts.set(key, (counts.get(key) ?? 0) + 1));
	let y = 0, last = [];
	for (const lane of header.lanes) {
		const keys = prefixes(lane.path);
		for (let depth = 0; depth < keys.length; depth++) {
			if (keys[depth] === last[depth] || keys.slice(0, depth).some((key) => folded.has(key))) continue;
			entries.push({ group: keys[depth], label: `${lane.path[depth]} (${counts.get(keys[depth])})`, depth, y, h: GROUP_PX });
			y += GROUP_PX;
		}
		last = keys;
		if (hidden(lane)) continue;
		const rowHeight = Math.max(2, Math.round(heights[lane.kind] * tall));
		const h = rowHeight * (lane.kind === "counter" ? 1 : lane.rows) + (rowHeight > 5 ? 1 : 0);
		entries.push({ lane, depth: keys.length, y, h, rowHeight });
		y += h;
	}
	return { entries, height: y, byLane: new Map(entries.filter((entry) => entry.lane).map((entry) => [entry.lane.lane, entry])) };
}

const prefixes = (path) => path.map((_, depth) => path.slice(0, depth + 1).join("\u0000"));

function entriesBetween(layout, top, bottom) {
	let low = 0, high = layout.entries.length;
	while (low < high) {
		const middle = (low + high) >>> 1, entry = layout.entries[middle];
		if (entry.y + entry.h <= top) low = middle + 1; else high = middle;
	}
	const found = [];
	for (; low < layout.entries.length && layout.entries[low].y < bottom; low++) found.push(layout.entries[low]);
	return found;
}

// ---- the pixel painter

/** Hatches by number, as in keys.py: a second channel beside colour. True where the darker line is. */
const HATCH = [() => false, (x, y) => (x + y) % 6 === 0, (x, y) => (x + 6000 - (y % 6)) % 6 === 0, (x, y) => x % 4 === 0 && y % 4 === 0,
	(x, y) => y % 4 === 1, (x) => x % 5 === 0, (x, y) => x % 6 === 0 || y % 6 === 0];

/** Writes spans as pixels into one image: a million rectangles cost no more than the pixels they cover. */
class Painter {
	resize(width, height, ratio) {
		this.ratio = ratio;
		this.width = Math.max(1, Math.round(width * ratio));
		this.height = Math.max(1, Math.round(height * ratio));
		this.image = new ImageData(this.width, this.height);
		this.pixels = new Uint32Array(this.image.data.buffer);
		this.sums = new Float64Array(256);
		this.seen = new Uint8Array(256);
	}

	/** Colours of keys on this background: full, dimmed, and by share of the pixel. */
	look(keys, paper) {
		const back = rgb(paper);
		this.paper = packed(back);
		this.looks = keys.map((key) => {
			const colour = rgb(key.colour);
			const shades = (whole) => Uint32Array.from({ length: 256 }, (_, s) => packed(mix(whole, back, 0.4 + 0.6 * (s / 255))));
			const dim = mix(colour, back, 0.22);
			const dark = isDark(colour);
			return { full: packed(colour), dim: packed(dim), shades: shades(colour), dimShades: shades(dim), hatch: key.hatch,
				edge: packed(mix(colour, back, 0.45)), line: packed(mix(colour, dark ? [255, 255, 255] : [0, 0, 0], 0.72)), ink: dark ? "#fff" : "#000" };
		});
	}

	begin(t0, t1) {
		this.t0 = t0;
		this.t1 = t1;
		this.scale = this.width / (t1 - t0);
		this.pixels.fill(this.paper);
		this.labels = [];
	}

	/** Top and height in pixels of a row, with a gap below it if there is room. */
	line(y, h) {
		const top = Math.round(y * this.ratio);
		return [top, Math.max(1, Math.round((y + h) * this.ratio) - top - (h >= 5 ? 1 : 0))];
	}

	fill(x0, x1, y, h, colour) {
		const top = Math.max(0, y), bottom = Math.min(this.height, y + h);
		for (let line = top * this.width; line < bottom * this.width; line += this.width) this.pixels.fill(colour, line + x0, line + x1);
	}

	rectangle(x0, x1, y, h, key, dim) {
		const look = this.looks[key];
		this.fill(x0, x1, y, h, dim ? look.dim : look.full);
		if (x1 - x0 > 3 && h > 2) this.fill(x0, x0 + 1, y, h, dim ? this.paper : look.edge); // where one span ends and the next begins
		if (look.hatch === 0 || dim || x1 - x0 < 5 || h < 4) return;
		const hatch = HATCH[look.hatch];
		for (let row = Math.max(0, y); row < Math.min(this.height, y + h); row++) {
			for (let x = x0; x < x1; x++) if (hatch(x, row)) this.pixels[row * this.width + x] = look.line;
		}
	}

	/** Spans [begin, end) of a store on one line. Lit ones are drawn over the dimmed others. y and h in px of the page. */
	spans(store, begin, end, y, h, hidden) {
		const [top, tall] = this.line(y, h);
		if (!store.lit) this.pass(store, begin, end, top, tall, hidden, null);
		else for (const lit of [0, 1]) this.pass(store, begin, end, top, tall, hidden, lit);
	}

	pass(store, begin, end, y, h, hidden, lit) {
		const { start, dur, key } = store, { scale, t0, width, sums, seen } = this;
		const dim = lit === 0, widest = 1 / scale, short = [], skip = (i) => (hidden.size && hidden.has(key[i])) || (lit !== null && store.lit[i] !== lit);
		const all = !hidden.size && lit === null;
		for (let i = begin; i < end;) {
			if (!all && skip(i)) { i++; continue; }
			const x = (start[i] - t0) * scale, wide = dur[i] * scale;
			if (wide >= 1) {
				if (x + wide > 0 && x < width) this.long(x, x + wide, y, h, store, i, dim);
				i++;
				continue;
			}
			const pixel = Math.floor(x + (x < 0 && x + wide > 0 ? wide : 0)), limit = t0 + (pixel + 1) / scale;
			let best = EMPTY, most = 0, whole = 0, count = 0, length = dur[i];
			do { // all that starts in this pixel
				if (all || !skip(i)) {
					const k = key[i];
					if (sums[k] === 0) seen[count++] = k;
					whole += length;
					if ((sums[k] += length + 1e-9) > most) { most = sums[k]; best = k; }
				}
				length = dur[++i];
			} while (i < end && start[i] < limit && length < widest);
			while (count) sums[seen[--count]] = 0;
			if (pixel >= 0 && pixel < width) short.push(pixel, best, Math.min(1, whole * scale));
		}
		for (let n = 0; n < short.length; n += 3) this.column(short[n], y, h, short[n + 1], short[n + 2], dim);
	}

	/** A span of at least a pixel; its name is written later if there is room. */
	long(from, to, y, h, store, i, dim) {
		const x0 = clamp(Math.round(from), 0, this.width - 1), x1 = Math.min(this.width, Math.max(Math.round(to), x0 + 1));
		this.rectangle(x0, x1, y, h, store.key[i], dim);
		if (x1 - x0 > 34 * this.ratio && h >= 10 * this.ratio && this.labels.length < 900) this.labels.push([x0, x1, y, h, store.nameOf(i), store.key[i], dim]);
	}

	column(x, y, h, key, share, dim) {
		const look = this.looks[key], colour = (dim ? look.dimShades : look.shades)[Math.round(share * 255)], { pixels, width } = this;
		for (let at = Math.max(0, y) * width + x, last = Math.min(this.height, y + h) * width; at < last; at += width) pixels[at] = colour;
	}

	/** One line of a tile: each pixel shows the fullest of the bins it covers. */
	tile(tile, line, y, h) {
		const [top, tall] = this.line(y, h);
		this.plane(tile, line, top, tall, tile.key, tile.share, Boolean(tile.litKey));
		if (tile.litKey) this.plane(tile, line, top, tall, tile.litKey, tile.litShare, false);
	}

	plane(tile, line, y, h, keys, shares, dim) {
		const bins = tile.width / (tile.t1 - tile.t0), from = line * tile.width;
		for (let x = 0; x < this.width; x++) {
			const t = this.t0 + x / this.scale;
			const low = Math.max(0, Math.floor((t - tile.t0) * bins)), high = Math.min(tile.width, Math.max(low + 1, Math.floor((t + 1 / this.scale - tile.t0) * bins)));
			if ((t - tile.t0) * bins < -1 || low >= tile.width) continue;
			let best = low;
			for (let bin = low + 1; bin < high; bin++) if (shares[from + bin] > shares[from + best]) best = bin;
			if (keys[from + best] !== EMPTY) this.column(x, y, h, keys[from + best], shares[from + best] / 255, dim);
		}
	}
}

// ---- the view: state and frames

const MODES = { pan: ["Pan", "drag moves the picture"], zoom: ["Zoom", "drag draws a box to zoom into"],
	measure: ["Measure", "drag measures a time"], brush: ["Select", "drag lists the spans of a stretch as a table"] };

class TimelineView {
	constructor(root, header, store, options = {}) {
		Object.assign(this, { root, header, store, options, t0: 0, t1: header.length, scroll: 0, tall: 1, mode: "pan", folded: new Set(header.folded), hidden: new Set(),
			cursor: { t: header.length / 2, row: header.lanes[0]?.first ?? 0 }, selected: null, measured: null, brushed: null, frames: 0 });
		this.painter = new Painter();
		this.built = build(this);
		this.context = this.built.canvas.getContext("2d");
		bindPointer(this);
		bindKeys(this);
		this.watch();
		this.fit();
	}

	watch() {
		this.observers = [new ResizeObserver(() => this.resize()), new MutationObserver(() => this.readTheme())];
		this.observers[0].observe(this.built.canvas);
		this.observers[1].observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "data-theme"] });
		this.media = matchMedia("(prefers-color-scheme: dark)");
		this.onmedia = () => this.readTheme();
		this.media.addEventListener("change", this.onmedia);
		this.readTheme();
	}
	destroy() {
		this.observers.forEach((observer) => observer.disconnect());
		this.media.removeEventListener("change", this.onmedia);
		cancelAnimationFrame(this.pending);
		clearTimeout(this.idle);
	}

	readTheme() {
		const style = getComputedStyle(this.root), colour = (name) => toHex(style.getPropertyValue(name));
		this.theme = { paper: colour("--tl-paper"), ink: colour("--tl-ink"), faint: colour("--tl-faint"), line: colour("--tl-line"), accent: colour("--tl-accent") };
		this.painter.look(this.header.keys, this.theme.paper);
		paintSwatches(this);
		this.draw();
	}

	resize() {
		const canvas = this.built.canvas, ratio = Math.min(window.devicePixelRatio || 1, 2);
		const width = canvas.clientWidth, height = canvas.clientHeight;
		if (width < 10 || (width === this.wide && height === this.high && ratio === this.ratio)) return;
		Object.assign(this, { wide: width, high: height, ratio });
		canvas.width = Math.round(width * ratio);
		canvas.height = Math.round(height * ratio);
		this.painter.resize(width - GUTTER, height - RULER, ratio);
		this.relayout();
	}

	relayout() {
		this.layout = layOut(this.header, this.folded, (this.high ?? 400) - RULER, this.tall);
		this.setScroll(this.scroll);
	}

	get width() { return (this.wide ?? GUTTER + 600) - GUTTER; }
	get length() { return this.t1 - this.t0; }
	xOf(t) { return GUTTER + ((t - this.t0) / this.length) * this.width; }
	tOf(x) { return this.t0 + ((x - GUTTER) / this.width) * this.length; }

	setScroll(value) {
		this.scroll = clamp(value, 0, Math.max(0, this.layout.height - (this.high - RULER)));
		this.draw();
	}

	setWindow(t0, t1, quiet) {
		const whole = this.header.length, length = clamp(t1 - t0, Math.min(10, whole), whole * 1.1);
		const middle = clamp((t0 + t1) / 2, 0, whole);
		this.t0 = middle - length / 2;
		this.t1 = middle + length / 2;
		if (!quiet) this.options.onrange?.(this.t0, this.t1);
		this.draw();
	}
	fit() { this.setWindow(-0.01 * this.header.length, 1.01 * this.header.length); }
	zoom(factor, t = (this.t0 + this.t1) / 2) { this.setWindow(t - (t - this.t0) * factor, t + (this.t1 - t) * factor); }
	pan(share) { this.setWindow(this.t0 + share * this.length, this.t1 + share * this.length); }

	draw() {
		if (this.pending || !this.wide) return;
		this.pending = requestAnimationFrame(() => {
			this.pending = 0;
			const begun = performance.now();
			this.frame();
			this.frameMs = performance.now() - begun;
			this.frames++;
			this.root.dataset.frames = this.frames;
		});
	}

	visible() { return entriesBetween(this.layout, this.scroll, this.scroll + this.high - RULER); }

	frame() {
		const { painter, context, ratio } = this, entries = this.visible(), rows = [];
		painter.begin(this.t0, this.t1);
		for (const entry of entries) {
			if (!entry.lane || entry.lane.kind === "counter") continue;
			for (let k = 0; k < entry.lane.rows; k++) {
				const y = entry.y - this.scroll + k * entry.rowHeight;
				if (y + entry.rowHeight < 0 || y > this.high) continue;
				rows.push(entry.lane.first + k);
				this.store.paintRow(painter, entry.lane.first + k, y, entry.rowHeight, this.hidden);
			}
		}
		context.setTransform(1, 0, 0, 1, 0, 0);
		context.putImageData(painter.image, Math.round(GUTTER * ratio), Math.round(RULER * ratio));
		context.setTransform(ratio, 0, 0, ratio, 0, 0);
		drawNames(this);
		drawCounters(this, entries);
		drawLabels(this, entries);
		drawRuler(this);
		drawOverlays(this);
		this.store.want({ t0: this.t0, t1: this.t1, width: this.width }, rows, this.hidden);
	}

	/** Row and time under a point of the canvas; row null outside the lanes. */
	under(x, y) {
		const entry = entriesBetween(this.layout, y - RULER + this.scroll, y - RULER + this.scroll + 1)[0];
		const lane = entry?.lane, k = entry && Math.floor((y - RULER + this.scroll - entry.y) / entry.rowHeight);
		return { entry, t: this.tOf(x), row: lane && lane.kind !== "counter" && y >= RULER ? lane.first + clamp(k, 0, lane.rows - 1) : null };
	}
	laneOf(row) { return this.header.lanes.find((lane) => row >= lane.first && row < lane.first + lane.rows); }
	rowY(row) {
		const lane = this.laneOf(row), entry = lane && this.layout.byLane.get(lane.lane);
		return entry ? RULER + entry.y - this.scroll + (row - lane.first) * entry.rowHeight + entry.rowHeight / 2 : null;
	}

	say(text) { this.built.live.textContent = plain(text); }
	try(promise) { return Promise.resolve(promise).catch((error) => this.say(error.message)); }

	/** Selects a span by id (null: nothing), shows what is known about it and brings it into sight. */
	async select(id, { reveal = true, quiet = false } = {}) {
		if ((id ?? -1) < 0) {
			this.selected = null;
			showFacts(this, null);
		} else {
			const turn = this.turn = {}, facts = await this.store.facts(id);
			if (turn !== this.turn) return; // a later selection was faster
			this.selected = facts;
			if (reveal) this.reveal(this.selected);
			this.cursor = { t: this.selected.start + this.selected.dur / 2, row: this.selected.row };
			showFacts(this, this.selected);
			const lane = this.laneOf(this.selected.row);
			this.say(`${this.selected.name}, ${this.selected.category}, on ${lane?.label ?? ""}: ${timeText(this.selected.dur)} from ${momentText(this.selected.start, this.length)}`);
		}
		if (!quiet) this.options.onselect?.(this.selected ? this.selected.id : -1);
		this.draw();
	}
	reveal(span) {
		if (span.start + span.dur < this.t0 || span.start > this.t1) {
			const length = Math.min(this.length, Math.max(20 * span.dur, this.length / 50));
			this.setWindow(span.start + span.dur / 2 - length / 2, span.start + span.dur / 2 + length / 2);
		}
		this.showRow(span.row);
	}
	showRow(row) {
		const lane = this.laneOf(row);
		if (lane && prefixes(lane.path).some((key) => this.folded.delete(key))) this.relayout();
		const y = this.rowY(row);
		if (y !== null && (y < RULER + 4 || y > this.high - 4)) this.setScroll(this.scroll + y - this.high / 2);
	}
	async selectAt(row, t) {
		const id = await this.store.at(row, t, (4 * this.length) / this.width, this.hidden);
		await this.select(id, { reveal: false });
		if (id === null) this.say(`nothing at ${momentText(t, this.length)} on ${this.laneOf(row)?.label ?? "this lane"}`);
	}

	async search(by = 1) {
		const pattern = this.built.search.value;
		try {
			const answer = await this.store.search(pattern, this.selected?.id ?? null, by);
			this.built.count.textContent = pattern ? (answer.number ? `${answer.number} of ${answer.count}` : `${answer.count} found`) : "";
			if (answer.id !== null) await this.select(answer.id);
			else if (pattern) this.say(`no span matches ${pattern}`);
		} catch (error) {
			this.built.count.textContent = "not a pattern";
			this.say(error.message);
		}
		this.draw();
	}

	/** Lights the spans that have these arguments, and only those. */
	async light(wanted) {
		const answer = await this.store.lightArguments(wanted);
		const what = Object.entries(wanted).map(([name, value]) => `${name} ${value}`).join(", ");
		this.lit = what ? { ...wanted } : null;
		this.root.dataset.lit = what ? answer.count : "";
		this.say(what ? `${answer.count} spans with ${what} are lit` : "nothing is lit");
		this.draw();
	}

	toggleKey(key) {
		if (!this.hidden.delete(key)) this.hidden.add(key);
		this.built.legend.children[key]?.setAttribute("aria-pressed", String(!this.hidden.has(key)));
		this.say(`${this.header.keys[key].name} ${this.hidden.has(key) ? "hidden" : "shown"}`);
		this.draw();
	}
	toggleGroup(key) {
		if (!this.folded.delete(key)) this.folded.add(key);
		this.relayout();
	}
	setMode(mode) {
		this.mode = mode;
		for (const [name, button] of Object.entries(this.built.modes)) button.setAttribute("aria-pressed", String(name === mode));
	}
	/** Rows of unfolded lanes, or those between two heights of the canvas. */
	rowsBetween(top = -Infinity, bottom = Infinity) {
		const rows = [];
		for (const { lane, y, h, rowHeight } of this.layout.entries) {
			if (!lane || lane.kind === "counter" || y + h < top || y > bottom) continue;
			for (let k = 0; k < lane.rows; k++) if (y + (k + 1) * rowHeight > top && y + k * rowHeight < bottom) rows.push(lane.first + k);
		}
		return rows;
	}
	showTable(t0 = this.t0, t1 = this.t1, rows = null) {
		const shown = rows ?? this.visible().filter((entry) => entry.lane && entry.lane.kind !== "counter")
			.flatMap(({ lane }) => Array.from({ length: lane.rows }, (_, k) => lane.first + k));
		this.try(this.store.table(t0, t1, shown, this.hidden).then((found) => tablePanel(this, found, t0, t1)));
	}
	setBrush(range, rows) {
		this.brushed = range;
		this.options.onbrush?.(range);
		if (range) this.showTable(range[0], range[1], rows);
		this.draw();
	}
	clear() {
		Object.assign(this, { measured: null, brushed: null, box: null });
		this.built.search.value = "";
		this.built.count.textContent = "";
		this.built.panel.replaceChildren();
		this.store.search("", null, 1).catch(() => {});
		if (this.lit) this.try(this.light({}));
		this.select(null);
	}
}

/** Any CSS colour as #rrggbb. */
function toHex(text) {
	const context = toHex.context ??= document.createElement("canvas").getContext("2d");
	context.fillStyle = "#808080";
	context.fillStyle = text.trim() || "#808080";
	const found = context.fillStyle;
	if (found.startsWith("#")) return found;
	const [r, g, b] = found.match(/[\d.]+/g).map(Number);
	return `#${[r, g, b].map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
}

// ---- overlays

const FONT = "11px system-ui, sans-serif";

function clipped(context, text, width) {
	const most = Math.floor(width / 6.2);
	return text.length <= most ? text : most > 2 ? `${text.slice(0, most - 1)}\u2026` : "";
}

function drawNames({ painter, context, ratio }) {
	context.font = FONT;
	context.textBaseline = "middle";
	for (const [x0, x1, y, h, name, key, dim] of painter.labels) {
		if (dim) continue;
		context.fillStyle = painter.looks[key].ink;
		context.fillText(clipped(context, plain(name), (x1 - x0) / ratio - 6), GUTTER + x0 / ratio + 3, RULER + (y + h / 2) / ratio + 0.5);
	}
}

function drawCounters(view, entries) {
	const { context, theme } = view, { counter_first: first, counter_t: times, counter_value: values } = view.header.counters ?? {};
	if (!first) return;
	for (const entry of entries) {
		if (entry.lane?.kind !== "counter") continue;
		const low = first.values[entry.lane.lane], high = first.values[entry.lane.lane + 1];
		const top = RULER + entry.y - view.scroll, base = top + entry.h - 2;
		if (entry.most === undefined) {
			entry.most = 0;
			for (let i = low; i < high; i++) entry.most = Math.max(entry.most, values.values[i] || 0);
		}
		context.beginPath();
		context.moveTo(GUTTER, base);
		let y = base;
		for (let i = Math.max(low, lowerBound(times.values, view.t0, low, high) - 1); i < high && times.values[i] <= view.t1; i++) {
			const x = Math.max(GUTTER, view.xOf(times.values[i]));
			context.lineTo(x, y);
			y = base - (entry.h - 6) * Math.max(0, (values.values[i] || 0) / (entry.most || 1));
			context.lineTo(x, y);
		}
		context.lineTo(view.wide, y);
		context.lineTo(view.wide, base);
		context.fillStyle = `${theme.accent}33`;
		context.fill();
		context.strokeStyle = theme.accent;
		context.stroke();
		if (entry.h > 20) text(context, `max ${Number(entry.most.toPrecision(3))}`, GUTTER + 4, top + 8, theme.faint);
	}
}

function paint(context, colour, ...box) {
	context.fillStyle = colour;
	context.fillRect(...box);
}

function text(context, words, x, y, colour) {
	context.fillStyle = colour;
	context.fillText(plain(words), x, y);
}

function drawLabels(view, entries) {
	const { context, theme } = view;
	paint(context, theme.paper, 0, 0, GUTTER, view.high);
	context.font = FONT;
	let last = -99;
	for (const entry of entries) {
		const y = RULER + entry.y - view.scroll, x = 8 + 10 * entry.depth;
		if (entry.group !== undefined) {
			paint(context, theme.line, 0, y, view.wide, entry.h - 1);
			text(context, `${view.folded.has(entry.group) ? "\u25b8" : "\u25be"} ${entry.label}`, x, y + entry.h / 2, theme.ink);
			last = y + entry.h - 4;
		} else {
			const middle = y + Math.min(entry.h, 18) / 2, mine = view.cursor.row >= entry.lane.first && view.cursor.row < entry.lane.first + entry.lane.rows;
			if (mine && entry.lane.kind !== "counter") {
				paint(context, theme.accent, GUTTER - 5, y, 3, Math.max(3, entry.h));
			}
			if (middle - last < 11) continue;
			text(context, clipped(context, plain(entry.lane.label), GUTTER - x - 8), x, middle, entry.lane.used ? theme.ink : theme.faint);
			last = middle;
		}
	}
}

function drawRuler(view) {
	const { context, theme, length } = view, step = niceStep((length / view.width) * 110);
	paint(context, theme.paper, 0, 0, view.wide, RULER);
	paint(context, theme.line, 0, RULER - 1, view.wide, 1);
	for (let t = Math.ceil(view.t0 / step) * step; t <= view.t1; t += step) {
		const x = view.xOf(t);
		paint(context, `${theme.faint}44`, x, RULER - 6, 1, view.high);
		text(context, momentText(t, step * 100), x + 3, 12, theme.faint);
	}
	const bound = view.header.uncertainty;
	text(context, bound ? `clocks agree to \u00b1${timeText(bound)}` : "time from the first span", 8, 12, theme.faint);
}

function band(view, range, colour, label) {
	const { context } = view, [a, b] = [Math.min(...range), Math.max(...range)].map((t) => clamp(view.xOf(t), GUTTER, view.wide));
	paint(context, `${colour}2e`, a, RULER, Math.max(1, b - a), view.high);
	for (const edge of [a, b]) paint(context, colour, edge, RULER, 1, view.high);
	text(context, label, a + 4, view.high - 10, view.theme.ink);
}

function drawOverlays(view) {
	const { context, theme, cursor, selected, box } = view;
	context.save();
	context.beginPath();
	context.rect(GUTTER, 0, view.width, view.high);
	context.clip();
	if (view.measured) band(view, view.measured, theme.accent, timeText(Math.abs(view.measured[1] - view.measured[0])));
	if (view.brushed) band(view, view.brushed, "#009E73", `selected ${timeText(Math.abs(view.brushed[1] - view.brushed[0]))}`);
	if (selected) drawSelected(view, selected);
	const x = Math.round(view.xOf(cursor.t));
	context.strokeStyle = theme.accent;
	context.setLineDash([4, 3]);
	context.strokeRect(x + 0.5, RULER, 0, view.high);
	context.setLineDash([]);
	text(context, momentText(cursor.t, view.length), Math.min(x + 4, view.wide - 90), RULER - 8, theme.ink);
	drawDoubt(view, cursor.t, RULER - 3);
	if (box) context.strokeRect(...box);
	context.restore();
}

/** How far another clock's time may be off: a whisker of twice the bound. */
function drawDoubt(view, t, y) {
	const reach = (view.header.uncertainty / view.length) * view.width;
	if (reach < 1) return;
	view.context.fillStyle = "#D55E00";
	view.context.fillRect(view.xOf(t) - reach, y - 1, 2 * reach, 2);
	for (const side of [-reach, reach]) view.context.fillRect(view.xOf(t) + side, y - 4, 1, 8);
}

function drawSelected(view, span) {
	const { context, theme } = view, y = view.rowY(span.row);
	if (y !== null) {
		const h = view.layout.byLane.get(view.laneOf(span.row).lane).rowHeight;
		context.lineWidth = 2;
		context.strokeStyle = theme.ink;
		context.strokeRect(view.xOf(span.start) - 1, y - h / 2 - 1, Math.max(3, (span.dur / view.length) * view.width) + 2, h + 2);
		context.lineWidth = 1;
	}
	for (const [from, to] of span.flows) {
		const [y0, y1] = [view.rowY(from.row), view.rowY(to.row)];
		if (y0 === null || y1 === null) continue;
		const x0 = view.xOf(from.start), x1 = view.xOf(to.start);
		context.strokeStyle = context.fillStyle = "#D55E00";
		context.beginPath();
		context.moveTo(x0, y0);
		context.bezierCurveTo(x0 + 30, y0, x1 - 30, y1, x1, y1);
		context.stroke();
		context.beginPath();
		context.moveTo(x1, y1);
		context.lineTo(x1 - 8, y1 - 4);
		context.lineTo(x1 - 8, y1 + 4);
		context.fill();
		if (view.laneOf(from.row).kind !== view.laneOf(to.row).kind) drawDoubt(view, to.start, y1);
	}
}

// ---- panels

function build(view) {
	const { root, header } = view;
	const modes = Object.fromEntries(Object.entries(MODES).map(([mode, [label, title]]) =>
		[mode, button(label, () => view.setMode(mode), title, { "aria-pressed": String(mode === "pan") })]));
	const search = el("input", { type: "search", placeholder: "search (regular expression)", "aria-label": "Search spans, regular expression",
		onkeydown: (event) => {
			event.stopPropagation();
			if (event.key === "Enter") view.search(event.shiftKey ? -1 : 1);
			if (event.key === "Escape") { event.preventDefault(); built.canvas.focus(); } // a search box would empty itself
		} });
	const built = {
		modes, search,
		count: el("span", { class: "tl-count", role: "status" }),
		state: el("span", { class: "tl-state", role: "status" }),
		canvas: el("canvas", { tabindex: 0, role: "application", class: "tl-canvas", style: `height:${view.options.height ?? 460}px`,
			"aria-label": plain(`Timeline. ${header.title}. Press question mark for keys.`) }),
		legend: el("div", { class: "tl-legend", role: "group", "aria-label": "Categories: hide or show" }),
		facts: el("div", { class: "tl-facts" }), panel: el("div", { class: "tl-panel" }), tip: el("div", { class: "tl-tip", hidden: "" }),
		live: el("div", { class: "tl-live", "aria-live": "polite" }),
	};
	const bar = el("div", { class: "tl-bar", role: "toolbar", "aria-label": "Timeline tools" }, ...Object.values(modes),
		button("\u2212", () => view.zoom(1.6), "zoom out"), button("+", () => view.zoom(1 / 1.6), "zoom in"), button("Fit", () => view.fit(), "whole trace (0)"),
		search, button("\u25c0", () => view.search(-1), "previous hit"), button("\u25b6", () => view.search(1), "next hit"), built.count,
		button("Show as table", () => view.showTable(), "spans in sight as a table (t)"), button("Keys", () => helpPanel(view), "keyboard (?)"), built.state);
	header.keys.forEach((key, k) => built.legend.append(el("button", { type: "button", "aria-pressed": "true", onclick: () => view.toggleKey(k),
		title: plain(`${key.count} spans, ${timeText(key.busy)}`) }, el("canvas", { width: 14, height: 14, "aria-hidden": "true" }), key.name)));
	const notes = el("details", { class: "tl-notes" }, el("summary", {}, `${header.diagnostics.length} note(s) on this trace; clock: ${header.clock}`), el("ul", {}, ...header.diagnostics.map((line) => el("li", {}, line))));
	const empty = header.spans ? [] : [el("p", {}, `This trace has no spans${header.counters.counter_t?.values.length ? ", only counters" : ": it is empty"}.`)];
	root.replaceChildren(el("div", { class: "tl-title" }, header.title), bar, ...empty, el("div", { class: "tl-stage" }, built.canvas, built.tip), built.legend,
		built.live, built.facts, built.panel, notes);
	return built;
}

function paintSwatches(view) {
	view.header.keys.forEach((key, k) => {
		const context = view.built.legend.children[k].firstChild.getContext("2d");
		context.fillStyle = key.colour;
		context.fillRect(0, 0, 14, 14);
		context.fillStyle = isDark(rgb(key.colour)) ? "#fff" : "#000";
		for (let y = 0; y < 14; y++) for (let x = 0; x < 14; x++) if (HATCH[key.hatch](x, y)) context.fillRect(x, y, 1, 1);
	});
}

function showFacts(view, span) {
	if (!span) return view.built.facts.replaceChildren();
	const lane = view.laneOf(span.row), list = el("dl", {});
	const line = (name, ...value) => list.append(el("dt", {}, name), el("dd", {}, ...value));
	line("on", lane?.label ?? "");
	line("starts", `${momentText(span.start, 1000)} (${span.start_ns} ns)`);
	line("lasts", timeText(span.dur, 6));
	for (const [name, value] of span.args) {
		line(name, button(value, () => view.try(view.light({ [name]: value })), `light all spans with ${name} ${value}`));
	}
	for (const [from, to] of span.flows) {
		const other = from.id === span.id ? to : from;
		line(other === to ? "leads to" : "comes from", button(other.name, () => view.select(other.id)), ` ${timeText(to.start - from.start)} from start to start`);
	}
	if (span.twin) line("in the other trace", button(timeText(span.twin.dur), () => view.select(span.twin.id)), ` ${timeText(span.twin.dur - span.dur)} longer, starts ${timeText(span.twin.start - span.start)} later`);
	if (view.header.unsent?.length) line("not shown here", view.header.unsent.join(", "));
	view.built.facts.replaceChildren(el("strong", {}, span.name), el("span", {}, ` ${span.category} `), list);
}

function tableOf(caption, head, rows) {
	return el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", { scope: "col" }, cell)))),
		el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}

const closeButton = (view) => button("Close table", () => view.built.panel.replaceChildren());

function tablePanel(view, found, t0, t1) {
	const where = `${momentText(t0, t1 - t0)} to ${momentText(t1, t1 - t0)}`;
	const totals = found.totals.map((row) => [row.name, row.category, row.count, timeText(row.inside), timeText(row.mean), timeText(row.longest)]);
	const spans = found.spans.map((row) => [button(row.name, () => view.select(row.id)), row.category, view.laneOf(row.row)?.label ?? "", momentText(row.start, t1 - t0), timeText(row.dur)]);
	view.built.panel.replaceChildren(closeButton(view),
		tableOf(`${found.count} spans from ${where}, by name`, ["name", "category", "spans", "time inside", "mean", "longest"], totals),
		tableOf(`the first ${spans.length} one by one`, ["name", "category", "lane", "start", "duration"], spans));
	view.say(`table of ${found.count} spans from ${where}`);
}

function helpPanel(view) {
	view.built.panel.replaceChildren(closeButton(view), tableOf("Keys of the timeline", ["key", "does"], view.header.help));
}

function showTip(view, span, x, y) {
	const tip = view.built.tip;
	if (!span) { tip.hidden = true; return; }
	const lines = [span.name, span.category, `${view.laneOf(span.row)?.label ?? ""}`, `${timeText(span.dur, 6)} from ${momentText(span.start, view.length)}`, ...span.args.map(([name, value]) => `${name} ${value}`)];
	tip.replaceChildren(...lines.filter(Boolean).map((line) => el("div", {}, String(line).slice(0, 300))));
	tip.hidden = false;
	tip.style.left = `${Math.min(x + 14, view.wide - tip.offsetWidth - 4)}px`;
	tip.style.top = `${y + 16}px`;
}

// ---- pointer and keys

function bindPointer(view) {
	const canvas = view.built.canvas, place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
	let drag = null, hover = 0;
	canvas.addEventListener("pointerdown", (event) => {
		const [x, y] = place(event);
		canvas.focus({ preventScroll: true });
		canvas.setPointerCapture(event.pointerId);
		const mode = y < RULER || event.altKey ? "measure" : event.shiftKey ? "zoom" : view.mode;
		drag = { x, y, mode, t0: view.t0, t1: view.t1, scroll: view.scroll, far: false };
		showTip(view, null);
	});
	canvas.addEventListener("pointermove", (event) => {
		const [x, y] = place(event);
		if (!drag) { hoverAt(x, y); return; }
		drag.far ||= Math.hypot(x - drag.x, y - drag.y) > 3;
		if (!drag.far || drag.x < GUTTER) return;
		const begin = view.tOf(drag.x), now = view.tOf(x);
		if (drag.mode === "pan") {
			const shift = ((x - drag.x) / view.width) * (drag.t1 - drag.t0);
			view.setWindow(drag.t0 - shift, drag.t1 - shift);
			view.setScroll(drag.scroll - (y - drag.y));
		} else if (drag.mode === "measure") view.measured = [begin, now];
		else view.box = [drag.x, drag.y, x - drag.x, y - drag.y];
		view.draw();
	});
	canvas.addEventListener("pointerup", (event) => {
		const [x, y] = place(event), done = drag;
		drag = null;
		if (!done) return;
		if (!done.far) { click(x, y); return; }
		const [a, b] = [view.tOf(Math.min(x, done.x)), view.tOf(Math.max(x, done.x))];
		const [top, bottom] = [Math.min(y, done.y), Math.max(y, done.y)].map((edge) => edge - RULER + view.scroll);
		view.box = null;
		if (done.mode === "zoom") { view.setWindow(a, b); view.setScroll(top - 10); }
		if (done.mode === "brush") view.setBrush([a, b], view.rowsBetween(top, bottom));
		if (done.mode === "measure") view.say(`measured ${timeText(b - a)}`);
		view.draw();
	});
	canvas.addEventListener("pointerleave", () => { hover++; showTip(view, null); });
	canvas.addEventListener("dblclick", () => view.selected && zoomTo(view, view.selected));
	canvas.addEventListener("wheel", (event) => {
		const [x] = place(event);
		const scrolls = view.layout.height > view.high - RULER;
		if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(clamp(event.deltaY, -200, 200) * 0.004), view.tOf(Math.max(x, GUTTER)));
		else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan((event.deltaX || event.deltaY) / view.width);
		else if (scrolls) view.setScroll(view.scroll + event.deltaY);
		else return;
		event.preventDefault();
	}, { passive: false });

	function click(x, y) {
		const { entry, row, t } = view.under(x, y);
		if (entry?.group !== undefined) { view.toggleGroup(entry.group); return; }
		if (row === null) return;
		view.cursor = { t: x < GUTTER ? view.cursor.t : t, row };
		if (x >= GUTTER) view.try(view.selectAt(row, t));
		view.draw();
	}
	async function hoverAt(x, y) {
		const mine = ++hover, { row, t } = view.under(x, y);
		if (row === null || x < GUTTER) { showTip(view, null); return; }
		if (!(view.store instanceof InlineStore)) await new Promise((done) => setTimeout(done, 90));
		if (mine !== hover) return;
		try {
			const id = await view.store.at(row, t, (3 * view.length) / view.width, view.hidden);
			const facts = id === null ? null : await view.store.facts(id);
			if (mine === hover) showTip(view, facts, x, y);
		} catch { showTip(view, null); }
	}
}

function zoomTo(view, span) {
	const margin = Math.max(span.dur * 0.2, 5);
	view.setWindow(span.start - margin, span.start + span.dur + margin);
}

function bindKeys(view) {
	const moveRow = (by) => {
		const rows = view.rowsBetween(), now = rows.indexOf(view.cursor.row);
		if (!rows.length) return;
		view.cursor.row = rows[clamp(now + by, 0, rows.length - 1)];
		view.showRow(view.cursor.row);
		view.say(view.laneOf(view.cursor.row).label);
		view.draw();
	};
	const moveCursor = (share) => {
		view.cursor.t = clamp(view.cursor.t, view.t0, view.t1) + share * view.length;
		if (view.cursor.t < view.t0 || view.cursor.t > view.t1) view.pan(share > 0 ? 0.25 : -0.25);
		view.say(momentText(view.cursor.t, view.length));
		view.draw();
	};
	const step = async (by) => (view.selected ? view.select(await view.store.step(view.selected.id, by, view.hidden) ?? view.selected.id) : view.selectAt(view.cursor.row, view.cursor.t));
	const mark = (what, done) => {
		const begun = view[what] && view[what][0] === view[what][1] ? view[what][0] : null;
		view[what] = begun === null ? [view.cursor.t, view.cursor.t] : [Math.min(begun, view.cursor.t), Math.max(begun, view.cursor.t)];
		if (begun === null) view.say("begin marked; move the cursor and press again"); else done(view[what]);
		view.draw();
	};
	const follow = () => {
		const pair = view.selected?.flows.find(([from]) => from.id === view.selected.id) ?? view.selected?.flows[0];
		return pair && view.select(pair[0].id === view.selected.id ? pair[1].id : pair[0].id);
	};
	const expert = () => view.selected?.args.find(([name]) => name === "expert");
	const tallness = (factor) => { view.tall = clamp(view.tall * factor, 0.3, 6); view.relayout(); };
	const keys = {
		ArrowLeft: () => view.pan(-0.1), ArrowRight: () => view.pan(0.1), ArrowUp: () => moveRow(-1), ArrowDown: () => moveRow(1),
		"Shift ArrowLeft": () => moveCursor(-0.02), "Shift ArrowRight": () => moveCursor(0.02), "Shift ArrowUp": () => tallness(0.8), "Shift ArrowDown": () => tallness(1.25),
		"+": () => view.zoom(1 / 1.6, inSight()), "=": () => view.zoom(1 / 1.6, inSight()), "-": () => view.zoom(1.6, inSight()), 0: () => view.fit(),
		Enter: () => view.selectAt(view.cursor.row, view.cursor.t), "[": () => step(-1), "]": () => step(1), z: () => view.selected && zoomTo(view, view.selected),
		f: follow, "/": () => view.built.search.focus(), n: () => view.search(1), N: () => view.search(-1),
		m: () => mark("measured", ([a, b]) => view.say(`measured ${timeText(b - a)}`)), b: () => mark("brushed", (range) => view.setBrush(range, null)),
		x: () => { const range = view.measured ?? view.brushed; if (range && range[0] !== range[1]) view.setWindow(...range); },
		l: () => expert() && view.light({ expert: expert()[1] }), c: () => { const lane = view.laneOf(view.cursor.row); if (lane) view.toggleGroup(prefixes(lane.path).at(-1)); },
		t: () => view.showTable(), "?": () => helpPanel(view), Escape: () => view.clear(),
	};
	const inSight = () => (view.cursor.t >= view.t0 && view.cursor.t <= view.t1 ? view.cursor.t : (view.t0 + view.t1) / 2);
	view.built.canvas.addEventListener("keydown", (event) => {
		if (event.ctrlKey || event.metaKey || event.altKey) return;
		const name = event.shiftKey && event.key.startsWith("Arrow") ? `Shift ${event.key}` : event.key;
		const digit = Number(event.key);
		const action = keys[name] ?? (digit >= 1 && digit <= view.header.keys.length ? () => view.toggleKey(digit - 1) : null);
		if (!action) return;
		event.preventDefault();
		event.stopPropagation(); // JupyterLab has keys of its own
		view.try(action());
	});
}

// ---- hooks

const pick = (columns, test) => Object.fromEntries(Object.entries(columns).filter(([name]) => test(name)));
const isCounter = (name) => name.startsWith("counter_");

function addCounters(header, columns) {
	header.counters = pick(columns, isCounter);
}

/** A timeline in `root`, fed by a channel. Resolves when the first picture is drawn. */
async function mount(root, channel, options = {}) {
	root.classList.add("mok-timeline");
	root.replaceChildren(el("p", { role: "status" }, "waiting for Python\u2026"));
	channel.onstate = (text) => { const state = root.querySelector(".tl-state") ?? root.querySelector("[role=status]"); if (state) state.textContent = text; };
	const begun = performance.now();
	const [header] = await channel.ask({ ask: "hello" });
	const columns = await fetchColumns(channel, header.columns);
	addCounters(header, columns);
	let view = null;
	const store = header.mode === "inline" ? new InlineStore(header, columns) : new RemoteStore(header, channel, () => view?.draw());
	view = new TimelineView(root, header, store, options);
	await drawn(view);
	root.dataset.firstDraw = Math.round(performance.now() - begun);
	if (header.mode === "inline") store.addArguments(await fetchColumns(channel, (await channel.ask({ ask: "arguments" }))[0].columns));
	root.dataset.ready = header.mode;
	return watchChannel(view, channel);
}

async function drawn(view) {
	view.resize();
	while (!view.frames || view.store.waiting) await new Promise((done) => { view.draw(); setTimeout(done, 5); });
}

/** Says so when Python is gone: a kernel that restarts by itself leaves no other sign than that nobody answers. */
function watchChannel(view, channel) {
	let tick = 0;
	const timer = setInterval(() => {
		if (!channel.alive()) channel.onstate("disconnected: the last view stays");
		else if (++tick % 5 === 0 && !document.hidden) channel.ask({ ask: "ping" }).catch(() => {});
	}, 2000);
	const destroy = view.destroy.bind(view);
	view.destroy = () => { clearInterval(timer); destroy(); };
	view.root.timeline = view;
	return view;
}

const channels = new WeakMap();
const channelOf = (model) => channels.get(model) ?? channels.set(model, widgetChannel(model)).get(model);

function initialize({ model }) { channelOf(model); }

async function render({ model, el: holder }) {
	const root = holder.appendChild(document.createElement("div"));
	const set = (name, value) => { model.set(name, value); model.save_changes(); };
	let later = 0, view = null;
	const onrange = (t0, t1) => { clearTimeout(later); later = setTimeout(() => set("range_ns", [t0, t1]), 250); };
	const highlight = () => view.try(view.light(model.get("highlight")));
	const selected = () => { if ((view.selected?.id ?? -1) !== model.get("selected")) view.try(view.select(model.get("selected"), { quiet: true })); };
	const range = () => { const [t0, t1] = model.get("range_ns"); if (t1 > t0 && (t0 !== view.t0 || t1 !== view.t1)) view.setWindow(t0, t1, true); };
	mount(root, channelOf(model), { height: model.get("height"), onrange, onselect: (id) => set("selected", id), onbrush: (stretch) => set("brush_ns", stretch ?? []) })
		.then((made) => {
			view = made;
			range();
			if (Object.keys(model.get("highlight")).length) highlight();
			if (model.get("selected") >= 0) selected();
			model.on("change:highlight", highlight);
			model.on("change:selected", selected);
			model.on("change:range_ns", range);
		}).catch((error) => root.replaceChildren(el("p", { role: "alert" }, error.message)));
	return () => {
		view?.destroy();
		for (const [name, listener] of [["highlight", highlight], ["selected", selected], ["range_ns", range]]) model.off(`change:${name}`, listener);
	};
}

export default { initialize, render };
