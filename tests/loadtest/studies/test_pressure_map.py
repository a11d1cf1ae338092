from __future__ import annotations

import pytest

from loadtest.studies.pressure_map import Point, draw_map

pytest.importorskip("matplotlib")


def test_a_column_for_each_kind_of_traffic() -> None:
    """The picture names its columns, its rows and its policies; same points, same bytes."""
    points = [
        Point(
            family=family,
            x=x,
            policy=policy,
            good_ratio=0.5 / x,
            ttft_mean_s=x * scale,
            num_computed_tokens=1000 * x * scale,
        )
        for family in ("skew 0", "siblings")
        for policy, scale in (("kv_aware", 1.0), ("least_loaded", 1.7))
        for x in (1.0, 3.0, 8.0)
    ]

    drawn = draw_map(points)

    assert drawn == draw_map(points)
    assert drawn.startswith(b"<?xml")
    assert drawn.count(b'id="axes_') == 6
    assert draw_map(points, kind="png").startswith(b"\x89PNG")
