"""How a determinism certificate looks: its verdict, its digests, and one row per configuration."""

from __future__ import annotations

import html
from typing import Any

from mok import display
from mok.certify import Certificate
from mok.views.measure import table


def certificate_html(certificate: Certificate) -> str:
    """The verdict, what ran, the digests, and the configurations folded away below; text is escaped."""
    head, *rows = certificate.table()
    verdict = "same bits" if certificate.ok else "bits differ"
    return (
        f"<p><b>{verdict}</b>: {html.escape(certificate.sentence())}</p>"
        f"{table(certificate.summary_rows()[1:])}"
        f"<details><summary>{len(rows)} configurations</summary>{table(rows, head)}</details>"
    )


def _bundle(certificate: Certificate) -> dict[str, Any]:
    return {"text/html": certificate_html(certificate)}


display.register(Certificate, _bundle)
