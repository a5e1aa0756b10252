"""What ranks tell each other when they meet, and whether it fits together."""

from __future__ import annotations

import pytest

from horovod._base.config import Config
from horovod.core.lifecycle.rank_exchange import check_settings


def test_settings_that_agree() -> None:
    check_settings([Config().common()] * 3)
    check_settings([Config(cache_capacity=7, bucket_bytes=100).common()] * 2)


def test_settings_that_differ_are_an_error_with_all_ranks_and_values() -> None:
    settings = [Config(), Config(cache_capacity=0), Config(), Config(cache_capacity=7, dynamic_process_sets=True)]
    with pytest.raises(ValueError) as caught:
        check_settings([each.common() for each in settings])
    text = str(caught.value)
    assert text.startswith("Horovod initialization failed: settings that must be the same on all ranks differ: ")
    assert "HOROVOD_CACHE_CAPACITY is 1024 on ranks 0, 2, 0 on rank 1, 7 on rank 3" in text
    assert "HOROVOD_DYNAMIC_PROCESS_SETS is 0 on ranks 0-2, 1 on rank 3" in text
    assert "FUSION" not in text


def test_how_long_things_may_take_is_each_ranks_own_affair() -> None:
    assert Config().common() == Config.from_env({"HOROVOD_GLOO_TIMEOUT_SECONDS": "7"}).common()
