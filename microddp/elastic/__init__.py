"""Ranks that come and go: those that stay meet anew, without a restart."""

from microddp.elastic.members import Generation, Members
