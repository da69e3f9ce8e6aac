// What only a page needs, placed behind timeline.js in the same script: a channel over HTTP, and traces that the page carries.

/** Asks a local server: JSON there; back come a length, JSON with the sizes of the buffers, and the buffers. */
function pageChannel(address, token) {
	const channel = {
		onstate: () => {},
		alive: () => true,
		async ask(request) {
			let response;
			try {
				response = await fetch(address, { method: "POST", headers: { "X-Token": token }, body: JSON.stringify(request) });
			} catch (error) {
				channel.onstate("disconnected: the server does not answer; the last view stays");
				throw error;
			}
			if (!response.ok) throw new Error(`the server refused: ${response.status}`);
			channel.onstate("");
			const data = await response.arrayBuffer();
			const length = new DataView(data).getUint32(0, true);
			const answer = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
			if (answer.error) throw new Error(answer.error);
			let at = 4 + length;
			const buffers = answer.buffers.map((size) => new Uint8Array(data.slice(at, (at += size))));
			return [answer, buffers];
		},
	};
	return channel;
}

/** A tile that came with the page: drawn as far as it goes, no single spans behind it. */
class PictureStore extends RemoteStore {
	constructor(header, tile) {
		super(header, null, () => {});
		this.tile = { ...tile, lines: new Map(Array.from({ length: header.num_rows }, (_, row) => [row, row])) };
	}
	want() {}
	async ask() { throw new Error("this page holds a picture of the trace; open the trace itself with `mok open`"); }
}

/** Bytes of a packed column (pack.py): planes of a zigzag number, running sums if `delta`. */
function unpackColumn(column, bytes) {
	const Type = TYPES[column.type], values = new Type(column.length);
	if (column.raw) return typed(column.type, bytes);
	for (let i = 0, sum = 0; i < column.length; i++) {
		let number = 0;
		for (let plane = column.planes - 1; plane >= 0; plane--) number = number * 256 + bytes[plane * column.length + i];
		number = number % 2 ? -(number + 1) / 2 : number / 2;
		values[i] = column.delta ? (sum += number) : number;
	}
	return values;
}

/** Reads a trace that a page carries: base64 of deflated columns behind a JSON header. */
async function unpack(text) {
	const packedBytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
	const stream = new Blob([packedBytes]).stream().pipeThrough(new DecompressionStream("deflate"));
	const data = await new Response(stream).arrayBuffer();
	const length = new DataView(data).getUint32(0, true);
	const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
	let at = 4 + length;
	const columns = {};
	for (const column of header.columns) columns[column.name] = { values: unpackColumn(column, new Uint8Array(data, at, column.bytes)), table: column.table, from: (at += column.bytes) };
	return [header, columns];
}

/** A timeline from the text of a packed trace, with no Python behind it. */
async function mountPacked(root, packedText, options = {}) {
	root.classList.add("mok-timeline");
	const [header, columns] = await unpack(packedText);
	addCounters(header, columns);
	const inline = header.mode === "inline";
	const store = inline ? new InlineStore(header, columns)
		: new PictureStore(header, { ...header.tile, key: columns.tile_key.values, share: columns.tile_share.values });
	if (inline) store.addArguments(pick(columns, (name) => name.startsWith("arg:")));
	const view = new TimelineView(root, header, store, options);
	await drawn(view);
	root.dataset.ready = header.mode;
	root.timeline = view;
	return view;
}
