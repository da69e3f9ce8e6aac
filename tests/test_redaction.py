"""Planted secrets: in the input wherever profilers put them, and in no output, decoded or as bytes."""

import gzip
import json
import sqlite3

import pytest

from mok.errors import InputError
from mok.trace import Trace
from mok.trace.read import open_trace
from mok.trace.read.private import Private
from mok.trace.read.redact import redact
from mok.trace.write import export
from tests.support.trace_builders import PROCESS, THREAD, Nsys, kernel, kineto, kineto_text, launch, span

TOKEN = "hf_9f8E7d6C5b4A3z"
VALUE = "blue-heron-partition"
HOST = "gpu-node-0417"
USER = "mjordan"
FOLDER = "moe-secret-project"
FLAG = "--wandb-run=zebra-4711"
OTHER = "keybase-daemon"
SECRETS = (TOKEN, VALUE, HOST, USER, FOLDER, FLAG, "zebra-4711", OTHER)
PATH = f"/home/{USER}/{FOLDER}/train.py"


def planted(path):
    """An export with a secret in every place nsys is known to put one."""
    file = Nsys().call(0, 90, correlation=1, callchainId=1).kernel(100, 200, "gemm_kernel", correlation=1)
    file.row("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE:HF_TOKEN", value=TOKEN)
    file.row("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE:SLURM_JOB_PARTITION", value=VALUE)
    file.row("META_DATA_CAPTURE", name="PROCESS_0:COMMAND", value=PATH)
    file.row("META_DATA_CAPTURE", name="PROCESS_0:ARGUMENT_1", value=FLAG)
    file.row("META_DATA_CAPTURE", name="PROCESS_0:USER_NAME", value=USER)
    file.row("META_DATA_CAPTURE", name="DEVICE_DISPLAY_NAME", value=f"{HOST}.cluster.internal")
    file.row("META_DATA_EXPORT", name="EXPORT_HOST", value=HOST)
    file.row("META_DATA_EXPORT", name="EXPORT_USER", value=USER)
    file.row("META_DATA_EXPORT", name="EXPORT_PARAM_INPUT_PATH_ABS", value=f"/home/{USER}/{FOLDER}/a.nsys-rep")
    file.row("TARGET_INFO_SYSTEM_ENV", name="Hostname", value=HOST)
    file.row("TARGET_INFO_SYSTEM_ENV", name="Environment", value=f"PATH=/usr/bin\nHF_TOKEN={TOKEN}\nPARTITION={VALUE}\n")
    file.row("TARGET_INFO_NIC_INFO", "name value", name="host", value=HOST)
    file.row(
        "ANALYSIS_FILE", id=0, filename=f"/home/{USER}/stdout.log", contentId=file.text(f"started by {USER} on {HOST} {FLAG}")
    )
    block = f"HOME=/home/{USER}\0HF_TOKEN={TOKEN}\0SLURM_JOB_PARTITION={VALUE}\0ARGS={FLAG}"
    file.text(block)
    file.row("PROCESSES", globalPid=PROCESS, pid=700, name=f"python3 {PATH} {FLAG}")
    file.row("PROCESSES", globalPid=(1 << 56) | (9 << 24), pid=9, name=OTHER)
    file.row("ThreadNames", nameId=file.text(OTHER), priority=20, globalTid=(1 << 56) | (9 << 24) | 9)
    file.row("ThreadNames", nameId=file.text(f"worker@{HOST}"), priority=20, globalTid=THREAD)
    file.row("CUDA_CALLCHAINS", id=1, symbol=file.text(f"{PATH}:12 step"), module=file.text(PATH), stackDepth=0)
    file.row("DIAGNOSTIC_EVENT", timestamp=0, severity=3, text=f"Cannot write {PATH} on {HOST} with HF_TOKEN={TOKEN}")
    file.nvtx(0, 50, f"epoch of {USER} in {VALUE}").nvtx(10, 20, f"load {PATH}", textId=None)
    return file.write(path)


def everything(trace):
    """All a Trace can show, as one text."""
    spans, meta = trace.spans, trace.meta
    texts = [*spans.name.table, *spans.category.table, *trace.lanes.label.table, repr(trace), repr(meta)]
    texts += [text for column in spans.args.values() if hasattr(column, "table") for text in column.table]
    return "\n".join(texts)


def assert_clean(text):
    for secret in SECRETS:
        data, word = (text, secret.encode()) if isinstance(text, bytes) else (text, secret)
        assert word not in data, secret


def test_the_input_really_holds_the_secrets(tmp_path):
    data = planted(tmp_path / "a.sqlite").read_bytes()
    for secret in SECRETS:
        assert secret.encode() in data


def test_an_opened_nsys_trace_holds_none(tmp_path):
    trace = open_trace(planted(tmp_path / "a.sqlite"))
    assert_clean(everything(trace))
    shown = everything(trace)
    assert "gemm_kernel" in shown
    assert "train.py:12 step" in shown  # the line stays, its folder does not
    assert "epoch of [redacted] in [redacted]" in shown
    assert trace.meta.coverage["flagged"] == {"environment_block_left_out": 1}
    written = trace.write(tmp_path / "t.parquet")
    assert_clean(written.read_bytes())
    assert_clean(everything(Trace.read(written)))


def test_keep_private_keeps_it(tmp_path):
    trace = open_trace(planted(tmp_path / "a.sqlite"), keep_private=True)
    shown = everything(trace)
    for secret in (TOKEN, VALUE, HOST, USER, FOLDER, FLAG):
        assert secret in shown, secret


def test_a_redacted_export_holds_none_in_tables_or_bytes(tmp_path):
    source = planted(tmp_path / "a.sqlite")
    before = source.read_bytes()
    done = redact(source)
    assert done.path == tmp_path / "a.redacted.sqlite"
    assert source.read_bytes() == before
    assert_clean(done.path.read_bytes())
    opened = sqlite3.connect(done.path)
    tables = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        assert_clean(repr(opened.execute(f'SELECT * FROM "{table}"').fetchall()))
    assert opened.execute("PRAGMA freelist_count").fetchone() == (0,)
    opened.close()
    assert "CUPTI_ACTIVITY_KIND_KERNEL" in tables
    assert "TARGET_INFO_NIC_INFO" not in tables
    one, two = open_trace(source), open_trace(done.path)
    assert one.spans.start_ns.tolist() == two.spans.start_ns.tolist()
    assert one.spans.name.decode().tolist() == two.spans.name.decode().tolist()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.redacted.sqlite", "a.sqlite"]


def planted_kineto(path, **more):
    events = [
        launch(1, 2),
        kernel(5, 9, "gemm_kernel"),
        span("python_function", f"{PATH}(12): step", 0, 50),
        span("user_annotation", f"run of {USER} on {HOST}", 0, 60),
        span("python_function", f"C:\\Users\\{USER}\\{FOLDER}\\main.py(3): f", 61, 1),
        {"ph": "M", "name": "thread_name", "pid": 700, "tid": 701, "ts": 0, "args": {"name": f"{HOST} main"}},
    ]
    header = {"env": {"HF_TOKEN": TOKEN, "PARTITION": VALUE, "ARGS": FLAG, "LIST": OTHER}, "hostname": HOST, "user": USER}
    kineto(path, events, **header, **more)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = data.replace(b'"traceName": "trace.json"', b'"traceName": "/home/%s/%s/trace.json"' % (USER.encode(), FOLDER.encode()))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_kineto_traces_lose_theirs(tmp_path, name):
    source = planted_kineto(tmp_path / name)
    trace = open_trace(source)
    assert_clean(everything(trace))
    assert "~/train.py(12): step" in everything(trace)
    assert "run of [redacted] on [redacted]" in everything(trace)
    done = redact(source)
    assert done.path.name == name.replace("a.", "a.redacted.", 1)
    data = done.path.read_bytes()
    assert_clean(data)
    text = gzip.decompress(data) if name.endswith("gz") else data
    assert_clean(text)
    assert "traceName" not in json.loads(text)
    two = open_trace(done.path)
    assert trace.spans.start_ns.tolist() == two.spans.start_ns.tolist()
    assert trace.spans.name.decode().tolist() == two.spans.name.decode().tolist()
    assert trace.lanes.rows() == two.lanes.rows()
    assert TOKEN in everything(open_trace(source, keep_private=True))


def test_escaped_letters_hide_nothing(tmp_path):
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in USER)
    data = kineto_text([kernel(1, 2, "NAME")], user=USER).replace("NAME", f"of {escaped}")
    path = tmp_path / "a.json"
    path.write_text(data)
    done = redact(path)
    assert USER not in json.dumps(json.loads(done.path.read_text()))
    assert escaped not in done.path.read_text()


def test_numbers_are_not_touched(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(kineto_text([kernel("TS", 1)], user=USER).replace('"TS"', "1711111111111111.123"))
    assert "1711111111111111.123" in redact(path).path.read_text()


def test_nothing_is_overwritten_and_strangers_are_refused(tmp_path):
    source = planted(tmp_path / "a.sqlite")
    (tmp_path / "a.redacted.sqlite").write_text("mine")
    with pytest.raises(InputError, match="exists and is left alone"):
        redact(source)
    assert (tmp_path / "a.redacted.sqlite").read_text() == "mine"
    (tmp_path / "b").write_text("hello")
    with pytest.raises(InputError, match="neither an nsys SQLite export nor a Kineto"):
        redact(tmp_path / "b")
    (tmp_path / "c").write_bytes(source.read_bytes()[:5000])
    with pytest.raises(InputError, match="damaged SQLite"):
        redact(tmp_path / "c")
    assert not list(tmp_path.glob(".*tmp"))


def test_a_word_that_cannot_be_taken_out_is_an_error_and_no_file(tmp_path, monkeypatch):
    source = planted(tmp_path / "a.sqlite")
    monkeypatch.setattr(Private, "scrub", lambda self, texts: list(texts))
    with pytest.raises(InputError, match="could not be taken out; nothing was written") as caught:
        redact(source)
    assert_clean(str(caught.value))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.sqlite"]


def test_triggers_of_a_hostile_file_do_not_run(tmp_path):
    source = planted(tmp_path / "a.sqlite")
    with sqlite3.connect(source) as opened:
        opened.execute(
            "CREATE TRIGGER bad AFTER UPDATE ON StringIds BEGIN INSERT INTO StringIds VALUES (NEW.id + 1000, OLD.value); END"
        )
        opened.execute("CREATE VIEW peek AS SELECT value FROM StringIds")
    opened.close()
    assert_clean(redact(source).path.read_bytes())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/x/y.py(3): f", "~/y.py(3): f"),
        ("/home/ann", "~/"),
        ("/home/ann/.venv/lib/python3.12/site-packages/torch/nn/a.py(1): g", "~/site-packages/torch/nn/a.py(1): g"),
        ("C:\\Users\\Ann\\w\\m.py", "~/m.py"),
        ("/usr/lib/python3/ast.py", "/usr/lib/python3/ast.py"),
        ("annotate ann ann.smith", "annotate [redacted] [redacted].smith"),
    ],
)
def test_what_is_taken_out_of_a_text(text, expected):
    private = Private()
    private.learn("USER", "ann")
    private.learn("TERM", "xterm")  # too short and too common to be private
    private.learn("PATH", "/usr/bin:/bin")
    assert private.scrub_one(text) == expected
    assert private.scrub_one("xterm /usr/bin") == "xterm /usr/bin"


@pytest.mark.parametrize(
    "path",
    [
        "/home/ann",
        "/home/ann/deep/x.py",
        "C:\\Users\\ann",
        "C:\\\\Users\\\\ann\\\\x.py",
        "D:/Users/ann/x.py",
        "/Users/ann Lee/deep/x.py",
        "/home/ann/deep one/deep/x.py",
        "/home/ann:/home/ann/deep",
    ],
)
def test_a_home_directory_leaves_its_last_name_at_most(path):
    kept = Private().scrub_one(f"at {path}(3): f")
    assert "ann" not in kept
    assert "Lee" not in kept
    assert "deep/" not in kept
    assert "one" not in kept
    assert kept.endswith("(3): f")


def test_switches_and_sizes_do_not_spell_kernels_anew(tmp_path):
    """Ordinary variables have names that sound secret; kernels are full of their values."""
    env = {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4096", "XDG_SESSION_CLASS": "user", "SSH_AUTH": "true"}
    names = ["void gemm<false, true, 4096>(user_data)", "gemm_4096x256"]
    trace = open_trace(kineto(tmp_path / "a.json", [kernel(1, 2, name) for name in names], env=env))
    assert set(trace.spans.name.table) == set(names)


def test_secrets_of_command_lines_and_single_assignments(tmp_path):
    more = {
        "cmd": "python train.py --api-key=zzKEYzz12345 --token tok_abcdef12 --max-tokens 4096",
        "env": ["HF_TOKEN=hf_secretvalue", "USER=annelise", "A=" + "B=" * 100_000],
        "config": {"argv": ["x", "PASSWORD=hunter"]},
    }
    name = "of zzKEYzz12345, tok_abcdef12, hf_secretvalue, annelise, hunter, 4096"
    source = kineto(tmp_path / "a.json", [kernel(1, 2, name)], **more)
    assert open_trace(source).spans.name.table == (("of " + "[redacted], " * 5 + "4096"),)
    text = redact(source).path.read_text()
    for secret in ("zzKEYzz12345", "tok_abcdef12", "hf_secretvalue", "annelise", "hunter"):
        assert secret not in text, secret


@pytest.mark.parametrize("ending", ["parquet", "json", "pftrace"])
def test_what_was_kept_leaves_when_the_kept_trace_is_opened(tmp_path, ending):
    """A Parquet file made with keep_private is imported like any other: nothing private without keep_private."""
    for source in (planted(tmp_path / "a.sqlite"), planted_kineto(tmp_path / "a.json")):
        kept = open_trace(source, keep_private=True).write(tmp_path / f"{source.suffix}.kept.parquet")
        assert TOKEN in everything(open_trace(kept, keep_private=True))
        trace = open_trace(kept)
        assert_clean(everything(trace))
        assert "private" not in trace.meta.provenance
        assert_clean(export(trace, tmp_path / f"{source.suffix}.out.{ending}").read_bytes())
        assert trace.spans.start_ns.tolist() == open_trace(source).spans.start_ns.tolist()


@pytest.mark.parametrize("where", ["before", "after"])
def test_surroundings_that_cannot_be_read_are_said_and_stop_redaction(tmp_path, where):
    """An unescaped quote in a variable: the token beside it is unknown, so a copy must not call itself redacted."""
    event = json.dumps(kernel(1, 2, f"of {TOKEN}"))
    around = f'"env": {{"A": "x"y: [", "HF_TOKEN": "{TOKEN}"}}'
    events = f'"traceEvents": [{event}]'
    path = tmp_path / "a.json"
    path.write_text("{" + (f"{around}, {events}" if where == "before" else f"{events}, {around}") + "}")
    try:
        trace = open_trace(path)
    except InputError:  # where the list of events itself cannot be found
        trace = None
    assert trace is None or any("cannot be read" in text and "private" in text for text in trace.meta.diagnostics)
    with pytest.raises(InputError):
        redact(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
