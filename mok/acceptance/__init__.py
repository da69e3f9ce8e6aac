"""Is an implementation as exact as its precision allows? One call that answers with a table, and can say no.

Errors are measured against the float64 oracle and judged by the error of the plainest implementation in the same
precision, the yardstick, so that no tolerance is a number somebody liked. The rules, per result tensor:

- `finite`: NaN where the truth is NaN (a NaN router weight), and nowhere else.
- `zero`: rows that are 0 because they have no terms (no route, an expert without rows) are exactly 0.
- `l2`, `tensor`: the error's L2 norm, per expert and over all experts, at most 1.05 times the yardstick's.
- `row`: the error of every row of 64 or more values at most twice the yardstick's 99th percentile in that expert.
- `element`, `median`: router gradient, |error| at most 2^-7 (bf16) or 2^-4 (mxfp8) of sum_h |d_out y_k| per route,
  and the median of that ratio at most 1.05 times the yardstick's.

The yardstick's rounding noise is one draw, and so is that of the result under test. Three allowances keep an honest
implementation from failing by luck; they shrink as 1/sqrt(size) and never look at the result under test:

- `l2`, `tensor` add five standard errors of the difference of two draws, estimated from the spread of the yardstick's
  own error over rows and columns, up to 2 times the yardstick. An expert with one row has few independent errors.
- `row` measures rows of gate and up gradients against the size of their terms too (`OracleResult`), as a row whose
  terms cancel is all rounding, and where the yardstick itself is beyond its percentile (a clamp that flipped) adds the
  yardstick's error in that row.
- `median` adds two standard errors, and needs 64 routes.

No limit lies below the error of the truth itself, rounded to the dtype of the result.
"""

from mok.acceptance.judge import References, accept, references, scale_test
from mok.acceptance.report import AcceptanceReport, AcceptanceRow

__all__ = ["AcceptanceReport", "AcceptanceRow", "References", "accept", "references", "scale_test"]
