"""Looks a node over: facts are collected below a root that is passed in, and pure checks find what is wrong."""
