// The expert board: one bar per expert, grouped by the rank that owns it. Click a bar to select the expert; drag its top
// down and sideways onto another bar to move routes there. Everything works by keyboard too. Text is only set as text.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, TOP = 14, BOTTOM = 34;

function shape(tag, attributes, ...children) {
	const node = document.createElementNS(SVG, tag);
	for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
	node.append(...children);
	return node;
}

class Board {
	constructor(model, holder) {
		Object.assign(this, { model, at: Math.max(0, model.get("selected")), grabbed: null, amount: 0, drag: null });
		this.svg = shape("svg", { class: "mok-board-svg", tabindex: 0, role: "application", "aria-label": this.title() });
		this.live = Object.assign(document.createElement("div"), { className: "mok-board-live" });
		this.live.setAttribute("aria-live", "polite");
		const root = Object.assign(document.createElement("div"), { className: "mok-board" });
		this.table = document.createElement("div");
		const show = Object.assign(document.createElement("button"), { type: "button", textContent: "Show as table", onclick: () => this.showTable() });
		root.append(this.svg, this.live, show, this.table);
		holder.append(root);
		this.svg.addEventListener("keydown", (event) => this.key(event));
		this.svg.addEventListener("pointerdown", (event) => this.down(event));
		this.svg.addEventListener("pointermove", (event) => this.move(event));
		this.svg.addEventListener("pointerup", (event) => this.up(event));
		this.sizes = new ResizeObserver(() => this.draw());
		this.sizes.observe(root);
		this.draw();
	}

	title() {
		const movable = this.model.get("movable") ? " Drag, or press Enter, to move routes." : "";
		return `Routes of ${this.model.get("loads").length} experts on ${this.model.get("ep")} ranks. Arrow keys choose, Space selects.${movable}`;
	}
	get loads() { return this.model.get("loads"); }
	get most() { return Math.max(1, ...this.loads, this.drag?.most ?? 0) * 1.05; }
	xOf(expert) { return LEFT + (expert * (this.width - LEFT)) / Math.max(this.loads.length, 1); }
	yOf(load) { return this.height - BOTTOM - (load / this.most) * (this.height - TOP - BOTTOM); }
	expertAt(x) { return Math.min(this.loads.length - 1, Math.max(0, Math.floor(((x - LEFT) / (this.width - LEFT)) * this.loads.length))); }
	loadAt(y) { return ((this.height - BOTTOM - y) / (this.height - TOP - BOTTOM)) * this.most; }
	place(event) { const box = this.svg.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; }
	say(text) { this.live.textContent = text; }

	draw() {
		this.width = this.svg.clientWidth || 700;
		this.height = this.svg.clientHeight || 220;
		const { loads } = this, ep = this.model.get("ep"), local = Math.max(1, loads.length / ep), colours = this.model.get("colours");
		const step = (this.width - LEFT) / Math.max(loads.length, 1), mean = loads.reduce((sum, load) => sum + load, 0) / Math.max(loads.length, 1);
		const base = this.yOf(0), parts = [];
		loads.forEach((load, expert) => {
			const chosen = expert === this.model.get("selected"), here = expert === this.at || expert === this.grabbed;
			parts.push(shape("rect", { x: this.xOf(expert), y: this.yOf(load), width: Math.max(step - 1, 0.6), height: base - this.yOf(load),
				fill: colours[Math.floor(expert / local) % colours.length], class: chosen ? "chosen" : here ? "here" : "" }));
		});
		for (let rank = 0; rank < ep; rank++) {
			const label = shape("text", { x: this.xOf(rank * local) + 2, y: this.height - 18 });
			label.textContent = ep <= 32 ? `rank ${rank}` : "";
			parts.push(shape("path", { d: `M${this.xOf(rank * local)} ${base}v6`, class: "axis" }), label);
		}
		const note = shape("text", { x: 2, y: this.yOf(mean) + 4 });
		note.textContent = `mean ${Math.round(mean)}`;
		const below = shape("text", { x: LEFT, y: this.height - 4 });
		below.textContent = "expert, by the rank that owns it";
		parts.push(shape("path", { d: `M${LEFT} ${this.yOf(mean)}H${this.width}`, class: "mean" }), note, below);
		if (this.drag?.far) parts.push(shape("path", { d: `M${this.drag.from[0]} ${this.drag.from[1]}L${this.drag.to[0]} ${this.drag.to[1]}`, class: "drag" }));
		this.svg.replaceChildren(...parts);
	}

	/** The bars as a table, or no table if there is one. */
	showTable() {
		if (this.table.firstChild) { this.table.replaceChildren(); return; }
		const table = document.createElement("table"), local = Math.max(1, this.loads.length / this.model.get("ep"));
		const line = (cells, kind) => cells.forEach((cell) => { table.rows[table.rows.length - 1].append(Object.assign(document.createElement(kind), { textContent: cell })); });
		table.createCaption().textContent = "Routes per expert";
		table.insertRow();
		line(["expert", "rank", "routes"], "th");
		this.loads.forEach((load, expert) => { table.insertRow(); line([expert, Math.floor(expert / local), load], "td"); });
		this.table.append(table);
	}

	select(expert) {
		this.at = expert;
		this.model.set("selected", expert === this.model.get("selected") ? -1 : expert);
		this.model.save_changes();
		this.say(this.model.get("selected") < 0 ? "nothing selected" : `expert ${expert} selected, ${this.loads[expert]} routes`);
		this.draw();
	}
	transfer(source, target, amount) {
		if (source === target || amount <= 0) { this.say("nothing moved"); return; }
		this.model.send({ move: [source, target, Math.round(amount)] });
		this.say(`moving ${Math.round(amount)} routes from expert ${source} to expert ${target}`);
	}

	down(event) {
		const at = this.place(event);
		this.svg.setPointerCapture(event.pointerId);
		this.svg.focus({ preventScroll: true });
		this.drag = { from: at, to: at, source: this.expertAt(at[0]), far: false, most: this.most / 1.05 };
	}
	move(event) {
		if (!this.drag) return;
		this.drag.to = this.place(event);
		this.drag.far ||= Math.hypot(this.drag.to[0] - this.drag.from[0], this.drag.to[1] - this.drag.from[1]) > 5;
		if (this.drag.far && this.model.get("movable")) {
			this.say(`move ${Math.round(this.dragged())} routes from expert ${this.drag.source} to expert ${this.expertAt(this.drag.to[0])}`);
			this.draw();
		}
	}
	/** As much as the pointer is below the top of the dragged bar. */
	dragged() { return Math.min(this.loads[this.drag.source], Math.max(0, this.loads[this.drag.source] - Math.max(0, this.loadAt(this.drag.to[1])))); }
	up(event) {
		const drag = this.drag, amount = drag && this.dragged();
		this.drag = null;
		if (!drag) return;
		if (!drag.far) this.select(drag.source);
		else if (this.model.get("movable")) this.transfer(drag.source, this.expertAt(this.place(event)[0]), amount);
		this.draw();
	}

	key(event) {
		const last = this.loads.length - 1, step = Math.max(1, Math.round(this.loads.reduce((sum, load) => sum + load, 0) / (20 * (last + 1))));
		const keys = {
			ArrowLeft: () => { this.at = Math.max(0, this.at - 1); }, ArrowRight: () => { this.at = Math.min(last, this.at + 1); },
			Home: () => { this.at = 0; }, End: () => { this.at = last; },
			ArrowUp: () => { this.amount += step; }, ArrowDown: () => { this.amount = Math.max(0, this.amount - step); },
			" ": () => this.select(this.at), Escape: () => { this.grabbed = null; },
			Enter: () => {
				if (!this.model.get("movable")) return;
				if (this.grabbed === null) { this.grabbed = this.at; this.amount = Math.min(step, this.loads[this.at]); return; }
				this.transfer(this.grabbed, this.at, this.amount);
				this.grabbed = null;
			},
		};
		if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
		event.preventDefault();
		event.stopPropagation();
		keys[event.key]();
		if (this.grabbed !== null) this.say(`holding ${this.amount} routes of expert ${this.grabbed} over expert ${this.at}; up and down change how many, Enter drops`);
		else if (event.key.startsWith("Arrow")) this.say(`expert ${this.at}, ${this.loads[this.at]} routes`);
		this.draw();
	}
}

function render({ model, el }) {
	const board = new Board(model, el), redraw = () => board.draw();
	for (const name of ["loads", "ep", "selected"]) model.on(`change:${name}`, redraw);
	return () => {
		board.sizes.disconnect();
		for (const name of ["loads", "ep", "selected"]) model.off(`change:${name}`, redraw);
	};
}

export default { render };
