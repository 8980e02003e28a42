# Copyright (c) the d2_memfit developers.
"""docs/TROUBLESHOOTING.md has every message that a user can be given; TiledImages has its own."""

import ast
import re

import pytest
from tiny import ROOT

TILED = ROOT / "projects" / "TiledImages"
DOCS = [ROOT / "docs" / "TROUBLESHOOTING.md", TILED / "README.md"]
ENTRIES = [
    entry
    for doc in DOCS
    for entry in re.findall(r"^\| `([^`]+)` \|", doc.read_text(), re.MULTILINE)
    if not re.fullmatch(r"[A-Z._]+", entry)  # a key
]

# Functions that write the texts of errors which are raised elsewhere, and the names under which
# those are passed on. The texts are looked for too.
WRITERS = {
    "_explained",
    "complaint_about",
    "complaints_about_boxes",
    "_no_such_key",
    "_unreadable",
    "final_message",
    "missing",
    "_warnings_about_classes",
    "why_it_does_not_fit",
    "why_no_card_has",
}
# Tables of texts by fault, which are filled in elsewhere.
TABLES = {"_CODES", "_IMAGES", "_KEYPOINTS", "_MASKS"}
PASSED_ON = {
    "'\\n'.join(errors)",
    "complaint",
    "error",
    "lacks",
    "message",
    "found.mistake",
    "mistake",
    "str(call)",
    "text",
    "warning",
}
PASSED_ON |= {"where + complaint", "where + text"}
PASSED_ON |= {"_DOES_NOT_FIT", "_INCOMPLETE", "_UNWELL", "STICKY_ERROR", "answer", "key", "name"}

# Not for users: caught where it is raised, or written into the results of measure-gpu.
INTERNAL = {
    "injected at \0",
    "injected in TorchScript",
    "injected at the end of a forward",
    "its images did not fit while its counts were looked for",
    "module \0 has no attribute \0",
    "a project is measured in a checkout: there is no \0",
    "no plan fits; \0 GB are needed",
    "the size of the result depends on values",
    "low >= high",
    "\0.\0 is not in a timeline",
    "these are not lists of the same images",
    "the last try returns or raises",
    "there are \0 tiles, and none has the number \0",
}


def template(node):
    """The text of an expression, with NUL for what is not known before it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "\0"


def called(node):
    return getattr(node.func, "id", None) or getattr(node.func, "attr", "")


def is_text(node):
    return isinstance(node, ast.Constant) and bool(re.search("[a-z]{3} [a-z]", str(node.value)))


def texts_of(node):
    """The expressions that make a user's message of this node, if it is one."""
    if isinstance(node, ast.FunctionDef) and node.name in WRITERS:
        nodes = list(ast.walk(node))
        texts = [n for n in nodes if isinstance(n, ast.JoinedStr)]
        texts = [n for n in texts if re.search("[a-z]{3}", pattern(template(n)) or "")]
        texts += [n.value for n in nodes if isinstance(n, ast.Return) and is_text(n.value)]
        return texts + [text for n in nodes if isinstance(n, ast.Dict) for text in n.values]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
        return node.value.values if ast.unparse(node.targets[0]) in TABLES else []
    if not isinstance(node, ast.Call):
        return []
    if called(node).endswith("Error"):
        return [*node.args[:1], *(k.value for k in node.keywords if k.arg == "problem")]
    if called(node) in ("warning", "error", "must"):
        return node.args[:1]
    if called(node) == "exit":  # with a text, or with a status
        return [n for n in node.args if pattern(template(n)) or isinstance(n, ast.Name)]
    is_logged = called(node) == "log_first_n" or ast.unparse(node.func) == "logger.log"
    return node.args[1:2] if is_logged else []


def messages():
    for file in [
        *(ROOT / "d2_memfit").rglob("*.py"),
        *(ROOT / "tools").glob("*.py"),
        *TILED.rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            for expression in texts_of(node):
                if not isinstance(expression, ast.Constant) or isinstance(expression.value, str):
                    yield file.relative_to(ROOT), expression


def pattern(text):
    """A regular expression for the first sentence of a message, with anything in its gaps."""
    text = re.sub(r"%\.?\d*[dfgrs]|{\w+}", "\0", text)
    sentences = [s for s in re.split(r"\. |\n", text) if re.search("[a-z]{2}", s)]
    return ".*".join(map(re.escape, sentences[0].split("\0"))) if sentences else None


def writes(expression):
    """Whether the text is that of one of WRITERS, or of an exit status."""
    name = called(expression) if isinstance(expression, ast.Call) else ""
    return name in WRITERS or ast.unparse(expression) in PASSED_ON


@pytest.fixture(scope="module")
def found():
    return [(str(file), text, pattern(template(text))) for file, text in messages()]


@pytest.mark.slow
def test_every_message_has_a_row(found):
    wanted = {(f, p) for f, _, p in found if p and p not in map(pattern, INTERNAL)}
    missing = [x for x in sorted(wanted) if not any(re.search(x[1], e) for e in ENTRIES)]
    assert not missing, (
        "add a row to docs/TROUBLESHOOTING.md for each of these texts of a file, with an example "
        "of the message in backticks, why it comes, and what to do"
    )


@pytest.mark.slow
def test_every_row_is_of_a_message(found):
    texts = [p for *_, p in found if p]
    stale = [e for e in ENTRIES if not any(re.search(text, e) for text in texts)]
    assert not stale, "nothing says this any more: remove these rows"


def test_messages_are_written_where_this_test_can_read_them(found):
    unread = [(f, ast.unparse(e)) for f, e, p in found if p is None and not writes(e)]
    assert not unread, "write the text in the call, or name its writer in WRITERS"
