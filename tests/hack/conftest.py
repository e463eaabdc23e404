from __future__ import annotations

from tests.daemonset.conftest import kube as kube
