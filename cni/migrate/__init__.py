"""Attachments of replaced CNI plugins, taken into the books."""
