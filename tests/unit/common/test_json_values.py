# SPDX-License-Identifier: Apache-2.0

import json
import math

from dspark_hf.common.files import json_values


def test_what_is_no_number_is_none_at_any_depth():
    found = json_values({"a": math.nan, "b": (1, -math.inf, [math.inf, 0.5]), "c": {"d": math.nan, "e": True}})
    assert found == {"a": None, "b": [1, None, [None, 0.5]], "c": {"d": None, "e": True}}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_other_values_are_kept():
    for value in ("NaN", None, 0, 1e308, [], {}):
        assert json_values(value) == value
