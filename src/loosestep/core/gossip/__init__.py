"""Peer-to-peer averaging in the background: the mailbox and what it is made of. Private."""
