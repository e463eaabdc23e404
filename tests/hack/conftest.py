from __future__ import annotations

import pytest

from tests.daemonset.manifests import Kube


@pytest.fixture(scope="session")
def kube() -> Kube:
    """helm and kubectl."""
    found = Kube.find()
    if found is None:
        pytest.skip("needs helm and kubectl: hack/fetch-kube could not have them")
    return found
