# SPDX-License-Identifier: Apache-2.0

from dspark_hf.common.files import shown_name


def test_folders_go_without_their_path_and_hub_ids_whole(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert shown_name(str(tmp_path / "my-model")) == shown_name(f"{tmp_path / 'my-model'}/") == "my-model"
    assert shown_name("org/my-model") == "org/my-model"
    assert shown_name("") == ""
