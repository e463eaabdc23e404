"""What comes from outside ends no line and steers no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.device import Snapshot
from agent.model.printable import (
    MASK,
    grouped,
    is_secret,
    joined,
    masked,
    masked_text,
    milli_text,
    one_line,
    page_size_name,
    parse_exact,
    parse_milli,
    parse_quantity,
    some,
    unknown,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((plain, plain) for plain in ("", "plain", "Zürich – ▲", "a  b", "back\\slash\\n")),
        ("two\nlines", "two\\nlines"),
        ("\r\x1b[2Jx", "\\r\\x1b[2Jx"),
        ("\x85\u2028\u2029", "\\x85\\u2028\\u2029"),
        ("\u202eevil", "\\u202eevil"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_would_end_a_line_or_steer_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(shown) == shown


def test_each_line_stays_one() -> None:
    assert joined(["a", "", "b\nc"]) == "a\n\nb\\nc"


@pytest.mark.parametrize(
    ("word", "meant"), [("isRDMA", "isRdma"), ("slect", "select"), ("ISRDMA", "isRdma"), ("x", "")]
)
def test_a_word_that_is_not_known_names_the_near_one(word: str, meant: str) -> None:
    said = f" (did you mean {meant!r}?)" if meant else ""
    assert unknown(word, ["select", "isRdma"]) == f"is not a known key{said}; known are: isRdma, select"


SECRETS = (
    *("password", "etcd_password", "dbPasswd", "passphrase", "pass", "wapi-pwd", "psk", "clientSecret", "secrets"),
    *("token", "bearerToken", "Authorization", "credentials", "privateKey", "private_key", "api-key", "accessKey"),
)
PLAIN = ("type", "range", "key", "pkeys", "passBy", "etcd_host", "kubeconfig", "keys", "bypass_mode", "", "compass")


def test_a_key_that_names_a_secret_is_known() -> None:
    assert [name for name in (*SECRETS, *PLAIN) if is_secret(name)] == list(SECRETS)


def test_secrets_are_left_out_at_any_depth_and_their_keys_stay() -> None:
    tree: dict[str, Any] = {
        "ipam": {"type": "infoblox", "servers": [{"host": "h", "password": "s3cret"}]},
        "credentials": {"user": "u", "word": "s3cret"},
        "many": ("a", {"token": ["s3cret"]}),
        "token": None,
        "count": 3,
    }
    assert masked(tree) == {
        "ipam": {"type": "infoblox", "servers": [{"host": "h", "password": MASK}]},
        "credentials": MASK,
        "many": ["a", {"token": MASK}],
        "token": None,
        "count": 3,
    }


def test_the_password_of_an_address_is_left_out() -> None:
    text = "cannot reach https://root:s3cr@t@etcd.example:2379/v2"
    assert masked_text("at https://root:s3cret@etcd:2379") == f"at https://root:{MASK}@etcd:2379"
    assert masked_text("see http://docs.example/a:b and mail me@example.org") == (
        "see http://docs.example/a:b and mail me@example.org"
    )
    assert masked_text(text) == f"cannot reach https://root:{MASK}@etcd.example:2379/v2"


Snapshots = Callable[[str], Snapshot]


@pytest.mark.parametrize(
    ("names", "shown"),
    [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d"], "a, b, c and 1 more")],
)
def test_so_many_names_are_shown_and_the_rest_is_counted(names: Sequence[str], shown: str) -> None:
    assert some(names, 3) == shown


def test_vfs_are_named_by_pf_and_range_and_others_as_they_are_called(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    pfs = [device for device in snapshot.devices if device.vfs]
    first, second, third, *_ = pfs
    assert grouped(first.vfs, snapshot) == "ens1f0np0: VFs 0–7"
    assert grouped([*first.vfs, *second.vfs], snapshot) == "ens1f0np0, ens2f0np0: VFs 0–7 each"
    assert grouped([first.vfs[3]], snapshot) == "ens1f0np0: VF 3"
    apart = [*first.vfs[:3], first.vfs[7], *second.vfs, third.address, f"{third.address} (mlx5_2)", "GPU-1"]
    assert grouped(apart, snapshot) == (
        f"{third.address}, {third.address} (mlx5_2), GPU-1; ens1f0np0: VFs 0–2, 7; ens2f0np0: VFs 0–7"
    )
    assert grouped([], snapshot) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("2Gi", 2 << 30),
        ("1500M", 1_500_000_000),
        ("0.5", Decimal("0.5")),
        (".5", Decimal("0.5")),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("+1E2", 100),
        ("1Ei", 1 << 60),
    ],
)
def test_quantities_are_read(text: Any, value: Any) -> None:
    assert parse_exact(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1 Gi", "1GB", "1e1000", "9" * 100, None, "Gi"])
def test_anything_else_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_exact(text)


def test_parts_are_rounded_up_as_kubernetes_does() -> None:
    assert parse_quantity("1500m") == 2
    assert parse_milli("0.0001") == 1


@given(st.integers(0, 10**9))
def test_thousandths_read_back(milli: int) -> None:
    assert parse_milli(milli_text(milli)) == milli


def test_huge_pages_are_named_as_kubelet_does() -> None:
    assert [page_size_name(size) for size in (2 << 20, 1 << 30, 64 << 10, 100)] == [
        "hugepages-2Mi",
        "hugepages-1Gi",
        "hugepages-64Ki",
        "hugepages-100",
    ]
