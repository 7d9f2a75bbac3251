"""Messages between ranks: sockets, frames, addresses, heartbeats, and who is a member of the
run. Private.
"""
