-- The ledger's tables. Times are seconds since the epoch; JSON columns hold objects.

-- What kubelet gave to pods: units, slots, and the results of claims. What is of one of these alone is empty elsewhere.
CREATE TABLE IF NOT EXISTS holds (
    key            TEXT PRIMARY KEY,
    resource_name  TEXT NOT NULL,
    since          REAL NOT NULL,
    pod_namespace  TEXT,
    pod_name       TEXT,
    pod_uid        TEXT,
    spec           TEXT,
    kind           TEXT NOT NULL,
    exclusive      INTEGER NOT NULL,
    container      TEXT NOT NULL,
    container_id   TEXT NOT NULL,
    cni_ifname     TEXT NOT NULL,
    bound_at       REAL NOT NULL,
    boot_id        TEXT NOT NULL,
    claim_uid      TEXT NOT NULL,
    request        TEXT NOT NULL,
    pool           TEXT NOT NULL,
    device_name    TEXT NOT NULL,
    share_id       TEXT NOT NULL,
    admin          INTEGER NOT NULL,
    identity       TEXT NOT NULL,
    network        TEXT NOT NULL,
    ifname         TEXT NOT NULL,
    shares         INTEGER NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS hold_devices (
    key        TEXT NOT NULL,
    position   INTEGER NOT NULL,
    device     TEXT NOT NULL,
    exclusive  INTEGER NOT NULL,
    PRIMARY KEY (key, position)
) STRICT;

-- Two slots or claims that have one device alone cannot exist, whatever the code above believes.
CREATE UNIQUE INDEX IF NOT EXISTS hold_devices_exclusive ON hold_devices (device) WHERE exclusive;

CREATE TABLE IF NOT EXISTS attachments (
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
    since          REAL NOT NULL,
    claim_uid      TEXT NOT NULL DEFAULT ''
) STRICT;

-- Two live attachments of one device cannot exist, whatever the code above believes.
CREATE UNIQUE INDEX IF NOT EXISTS attachments_device ON attachments (device);

CREATE TABLE IF NOT EXISTS quarantine (
    device   TEXT PRIMARY KEY,
    reason   TEXT NOT NULL,
    since    REAL NOT NULL,
    boot_id  TEXT NOT NULL DEFAULT ''
) STRICT;

-- Addresses of interfaces whose device is back, that the IPAM plugin has not taken back yet.
CREATE TABLE IF NOT EXISTS owed_leases (
    lease_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    container_id  TEXT NOT NULL,
    ifname        TEXT NOT NULL,
    netns_path    TEXT NOT NULL,
    request       TEXT NOT NULL,
    since         REAL NOT NULL,
    tried_at      REAL NOT NULL DEFAULT 0,
    problem       TEXT NOT NULL DEFAULT ''
) STRICT;

-- What VFs are called and look like while no pod has them, and what stays theirs when a reboot moves them.
CREATE TABLE IF NOT EXISTS known_devices (
    device    TEXT PRIMARY KEY,
    identity  TEXT NOT NULL,
    netdev    TEXT NOT NULL,
    mac       TEXT NOT NULL,
    mtu       INTEGER NOT NULL,
    boot_id   TEXT NOT NULL,
    seen      REAL NOT NULL
) STRICT;

-- The node's rails, plane by plane: a number stays with its adapter, also while that is away.
CREATE TABLE IF NOT EXISTS rails (
    number    INTEGER NOT NULL,
    plane     INTEGER NOT NULL,
    device    TEXT NOT NULL,
    identity  TEXT NOT NULL,
    netdev    TEXT NOT NULL,
    is_named  INTEGER NOT NULL,
    is_settled  INTEGER NOT NULL,
    PRIMARY KEY (number, plane)
) STRICT;

-- DRA claims that kubelet gave to this node, and the devices of each. Reboots leave them.
CREATE TABLE IF NOT EXISTS claims (
    claim_uid  TEXT PRIMARY KEY,
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    pods       TEXT NOT NULL,
    only_pod   TEXT NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('preparing', 'prepared', 'unpreparing')),
    boot_id    TEXT NOT NULL,
    since      REAL NOT NULL
) STRICT;
