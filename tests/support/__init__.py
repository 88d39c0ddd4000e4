"""Planted histories, a browser, a faulty network and a Shiva cluster for the tests."""
