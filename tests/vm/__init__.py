"""Tests against a real kernel with real SR-IOV adapters. They run in the machine of `hack/vm` only."""
