"""Faults on purpose: workers that end at a chosen moment, and a tool that kills hundreds of them."""
