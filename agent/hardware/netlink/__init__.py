"""rtnetlink: links, addresses, routes, and what PFs enforce on VFs."""
