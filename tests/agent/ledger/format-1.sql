-- The ledger's tables. Times are seconds since the epoch; JSON columns hold objects.

CREATE TABLE grants (
    unit_id        TEXT PRIMARY KEY,
    resource_name  TEXT NOT NULL,
    device         TEXT NOT NULL,
    granted_at     REAL NOT NULL,
    pod_namespace  TEXT,
    pod_name       TEXT,
    pod_uid        TEXT
) STRICT;

CREATE TABLE attachments (
    attachment_id  INTEGER PRIMARY KEY AUTOINCREMENT,
    container_id   TEXT NOT NULL,
    cni_ifname     TEXT NOT NULL,
    pod_namespace  TEXT NOT NULL,
    pod_name       TEXT NOT NULL,
    pod_uid        TEXT NOT NULL,
    netns_device   INTEGER NOT NULL,
    netns_inode    INTEGER NOT NULL,
    netns_path     TEXT NOT NULL,
    ifname         TEXT NOT NULL,
    device         TEXT NOT NULL,
    resource_name  TEXT NOT NULL,
    state          TEXT NOT NULL CHECK (state IN ('attaching', 'attached', 'detaching')),
    undo           TEXT NOT NULL,
    request        TEXT NOT NULL,
    result         TEXT,
    boot_id        TEXT NOT NULL,
    since          REAL NOT NULL
) STRICT;

-- Two live attachments of one device cannot exist, whatever the code above believes.
CREATE UNIQUE INDEX attachments_device ON attachments (device);
CREATE INDEX attachments_owner ON attachments (container_id, cni_ifname);

CREATE TABLE quarantine (
    device  TEXT PRIMARY KEY,
    reason  TEXT NOT NULL,
    since   REAL NOT NULL
) STRICT;

-- Addresses of interfaces whose device is back, that the IPAM plugin has not taken back yet.
CREATE TABLE owed_leases (
    lease_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    container_id  TEXT NOT NULL,
    ifname        TEXT NOT NULL,
    netns_path    TEXT NOT NULL,
    request       TEXT NOT NULL,
    since         REAL NOT NULL
) STRICT;
