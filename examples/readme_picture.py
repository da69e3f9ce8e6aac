"""Draw the README's picture: the predicted timeline of one rank's forward kernel, one row per SM.

Needs the extra `png` (kaleido and a Chromium): `python examples/readme_picture.py docs/images/timeline.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import mok
from mok.simulate import simulate
from mok.trace.raster import raster
from mok.views import timeline_static

COMM_SMS = 8


def main() -> None:
    """Simulate a DeepSeek-V3 layer at EP 8 on an H200 and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("png", type=Path)
    target = parser.parse_args().png
    config = dataclasses.replace(mok.MoKConfig(), fwd_num_comm_sms=COMM_SMS)
    work = mok.Workload(shape=mok.MoEShape.preset("deepseek-v3"), tokens=8192, ep=8, direction="forward", config=config)
    made = simulate(work, "h200")
    lanes = [lane for lane, kind in enumerate(made.trace.lanes.kind.decode()) if kind == "sm"]
    kernel = made.kernel("forward")
    begin = round(kernel.begin_ns)
    picture = raster(made.trace, lanes, begin, begin + round(kernel.time_ns), 600, by="name")
    figure = timeline_static.lanes_figure(
        picture, f"DeepSeek-V3 layer, EP 8, 8192 tokens a rank: one rank's forward, {COMM_SMS} communication SMs", made.label
    )
    figure.update_layout(margin_t=110)
    figure.write_image(target, width=1100, height=560, scale=1.5)


if __name__ == "__main__":
    main()
