"""What is listened to: kernel uevents, link messages, LLDP frames."""
