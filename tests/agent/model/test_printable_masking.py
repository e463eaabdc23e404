"""Secrets are left out of what is shown, at any depth, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from agent.model.printable import MASK, is_secret, masked, masked_text

SECRETS = (
    *("password", "etcd_password", "dbPasswd", "passphrase", "pass", "wapi-pwd", "psk", "clientSecret", "secrets"),
    *("token", "bearerToken", "Authorization", "credentials", "privateKey", "private_key", "api-key", "accessKey"),
)
PLAIN = ("type", "range", "key", "pkeys", "passBy", "etcd_host", "kubeconfig", "keys", "bypass_mode", "", "compass")


@pytest.mark.parametrize("name", SECRETS)
def test_a_key_that_names_a_secret_is_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_other_keys_are_none(name: str) -> None:
    assert not is_secret(name)


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


def test_a_tree_without_secrets_stays_as_it_is() -> None:
    tree = {"name": "rails", "mtu": 9000, "ipam": {"type": "whereabouts", "range": "192.168.100.0/22"}, "on": [True]}
    assert masked(tree) == tree
