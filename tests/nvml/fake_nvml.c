/* A libnvidia-ml.so.1 for tests, told what to show by the file that FAKE_NVML names. The file may be
 * replaced at any time; each call looks whether it was. tests/nvml/fake.py writes it: one statement a
 * line, fields separated by tabs.
 *
 *   init CODE                      what initialisation returns (0: success)
 *   hang NAME                      calls of that name (without "nvml") do not return while this stands
 *   fail NAME CODE                 calls of that name return the code
 *   gpu UUID BUS MINOR MEMORY ERROR ECC ROWS RECOVERY HOT INFOROM MIG NAME
 *        ERROR: what every call about it returns; ROWS: pending and failed as "0,0", or "-" for a GPU
 *        that cannot remap; RECOVERY: the driver's advice, or -1; MINOR -1 and MEMORY 0: not supported
 *   mig GPU-UUID UUID GI CI MEMORY-MB OF-GPU OF-COMPUTE NAME
 *   link GPU-UUID BUS              one NVLink to another GPU; BUS "switch" for one to a switch
 *   fabric GPU-UUID STATE CLUSTER(32 hex digits) CLIQUE
 *   event NUMBER GPU-UUID XID GI CI      delivered once to each event set made before it was written
 *
 * As with the real one, the GPUs that can be listed are those there were when the first user
 * initialised the library, until the last one shuts it down; and a GPU that is gone is "lost". */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
	SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
	TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, CORRUPTED_INFOROM = 14, GPU_IS_LOST = 15, UNKNOWN = 999
};
enum { MOST = 64, LINKS = 18, XID_EVENT = 8, HOT = 0x40, RECOVERY_FIELD = 230, COMPLETED = 3 };

struct device {
	char uuid[96], bus[32], name[96], rows[16];
	struct device *parent; /* of a MIG device */
	int here, error, minor, recovery, hot, inforom, mig, gi, ci, of_gpu, of_compute;
	unsigned long long memory, ecc;
	char link[LINKS][32];
	int links, fabric;
	unsigned char cluster[16];
	unsigned clique;
};
struct pci_info { char legacy[16]; unsigned domain, bus, device, pci_device, subsystem; char bus_id[32]; };
struct event { unsigned long number; char uuid[96]; unsigned long long xid; unsigned gi, ci; };
struct event_set { struct device *registered[MOST]; int count; unsigned long seen; };
struct event_data { struct device *device; unsigned long long type, data; unsigned gi, ci; };
struct statement { char name[64]; int code; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MOST];
static struct event events[1024];
static struct statement hangs[16], fails[16];
static int device_count, event_count, hang_count, fail_count, init_result, users;
static struct device *visible[MOST], *listed[MOST];
static int visible_count, listed_count;
static struct stat last;

static struct device *device_of(const char *uuid, int make)
{
	for (int i = 0; i < device_count; i++)
		if (!strcmp(devices[i].uuid, uuid))
			return &devices[i];
	if (!make || device_count == MOST)
		return NULL;
	snprintf(devices[device_count].uuid, sizeof devices->uuid, "%s", uuid);
	return &devices[device_count++];
}

static void state(char *f[], int n)
{
	struct device *d;
	if (!strcmp(f[0], "init") && n > 1) {
		init_result = atoi(f[1]);
	} else if (!strcmp(f[0], "hang") && n > 1 && hang_count < 16) {
		snprintf(hangs[hang_count++].name, sizeof hangs->name, "%s", f[1]);
	} else if (!strcmp(f[0], "fail") && n > 2 && fail_count < 16) {
		snprintf(fails[fail_count].name, sizeof fails->name, "%s", f[1]);
		fails[fail_count++].code = atoi(f[2]);
	} else if (!strcmp(f[0], "gpu") && n > 12 && (d = device_of(f[1], 1))) {
		snprintf(d->bus, sizeof d->bus, "%s", f[2]);
		d->minor = atoi(f[3]);
		d->memory = strtoull(f[4], NULL, 10);
		d->error = atoi(f[5]);
		d->ecc = strtoull(f[6], NULL, 10);
		snprintf(d->rows, sizeof d->rows, "%s", f[7]);
		d->recovery = atoi(f[8]);
		d->hot = atoi(f[9]);
		d->inforom = atoi(f[10]);
		d->mig = atoi(f[11]);
		snprintf(d->name, sizeof d->name, "%s", f[12]);
		d->here = 1;
		listed[listed_count++] = d;
	} else if (!strcmp(f[0], "mig") && n > 8 && (d = device_of(f[2], 1))) {
		d->parent = device_of(f[1], 0);
		d->gi = atoi(f[3]);
		d->ci = atoi(f[4]);
		d->memory = strtoull(f[5], NULL, 10) << 20;
		d->of_gpu = atoi(f[6]);
		d->of_compute = atoi(f[7]);
		snprintf(d->name, sizeof d->name, "%s", f[8]);
		d->here = 1;
	} else if (!strcmp(f[0], "link") && n > 2 && (d = device_of(f[1], 0)) && d->links < LINKS) {
		snprintf(d->link[d->links++], sizeof d->link[0], "%s", f[2]);
	} else if (!strcmp(f[0], "fabric") && n > 4 && (d = device_of(f[1], 0))) {
		d->fabric = atoi(f[2]);
		for (int i = 0; i < 16; i++) {
			unsigned byte = 0;
			sscanf(f[3] + 2 * i, "%2x", &byte);
			d->cluster[i] = (unsigned char)byte;
		}
		d->clique = (unsigned)atoi(f[4]);
	} else if (!strcmp(f[0], "event") && n > 5 && event_count < 1024) {
		struct event *e = &events[event_count++];
		e->number = strtoul(f[1], NULL, 10);
		snprintf(e->uuid, sizeof e->uuid, "%s", f[2]);
		e->xid = strtoull(f[3], NULL, 10);
		e->gi = (unsigned)strtoul(f[4], NULL, 10);
		e->ci = (unsigned)strtoul(f[5], NULL, 10);
	}
}

static void load(void) /* with the lock */
{
	struct stat now;
	const char *path = getenv("FAKE_NVML");
	if (!path || stat(path, &now)) {
		init_result = UNKNOWN;
		return;
	}
	if (now.st_ino == last.st_ino && now.st_mtim.tv_sec == last.st_mtim.tv_sec &&
	    now.st_mtim.tv_nsec == last.st_mtim.tv_nsec && now.st_size == last.st_size)
		return;
	FILE *file = fopen(path, "r");
	if (!file)
		return;
	last = now;
	event_count = hang_count = fail_count = listed_count = init_result = 0;
	for (int i = 0; i < device_count; i++) {
		devices[i].here = devices[i].links = devices[i].fabric = 0;
		devices[i].parent = NULL;
	}
	char line[512], *fields[16], *rest;
	while (fgets(line, sizeof line, file)) {
		int n = 0;
		line[strcspn(line, "\n")] = 0;
		for (char *part = strtok_r(line, "\t", &rest); part && n < 16; part = strtok_r(NULL, "\t", &rest))
			fields[n++] = part;
		if (n)
			state(fields, n);
	}
	fclose(file);
}

static void nap(void)
{
	struct timespec two_ms = {0, 2000000};
	nanosleep(&two_ms, NULL);
}

/* Begin a call: wait while the file says that it hangs, and return what it says that it returns.
 * The lock is held afterwards if and only if it returns 0. */
static int begin(const char *name, struct device *d, int needs_init)
{
	for (;;) {
		int hung = 0, code = SUCCESS;
		pthread_mutex_lock(&lock);
		load();
		for (int i = 0; i < hang_count; i++)
			hung |= !strcmp(hangs[i].name, name);
		for (int i = 0; i < fail_count; i++)
			if (!strcmp(fails[i].name, name))
				code = fails[i].code;
		if (!hung) {
			if (!code && needs_init && !users)
				code = UNINITIALIZED;
			if (!code && d)
				code = !d->here || (d->parent && !d->parent->here) ? GPU_IS_LOST :
				       d->parent ? d->parent->error : d->error;
			if (code)
				pthread_mutex_unlock(&lock);
			return code;
		}
		pthread_mutex_unlock(&lock);
		nap();
	}
}

static int end(int code)
{
	pthread_mutex_unlock(&lock);
	return code;
}

#define BEGIN(name, device) do { int code = begin(name, device, 1); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	int code = begin("Init", NULL, 0);
	if (code)
		return code;
	if (init_result)
		return end(init_result);
	if (!users++) {
		memcpy(visible, listed, sizeof visible);
		visible_count = listed_count;
	}
	return end(SUCCESS);
}

int nvmlShutdown(void)
{
	BEGIN("Shutdown", NULL);
	users--;
	return end(SUCCESS);
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
	BEGIN("DeviceGetCount", NULL);
	*out = (unsigned)visible_count;
	return end(SUCCESS);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
	BEGIN("DeviceGetHandleByIndex", NULL);
	if (index >= (unsigned)visible_count)
		return end(INVALID_ARGUMENT);
	*out = visible[index];
	return end(visible[index]->here ? visible[index]->error : GPU_IS_LOST);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, struct device **out)
{
	unsigned asked[4], found[4];
	if (sscanf(address, "%x:%x:%x.%x", asked, asked + 1, asked + 2, asked + 3) != 4)
		return INVALID_ARGUMENT;
	BEGIN("DeviceGetHandleByPciBusId", NULL);
	for (int i = 0; i < visible_count; i++)
		if (sscanf(visible[i]->bus, "%x:%x:%x.%x", found, found + 1, found + 2, found + 3) == 4 &&
		    !memcmp(asked, found, sizeof asked)) {
			*out = visible[i];
			return end(visible[i]->here ? visible[i]->error : GPU_IS_LOST);
		}
	return end(NOT_FOUND);
}

int nvmlDeviceGetUUID(struct device *d, char *out, unsigned length)
{
	if (!d)
		return INVALID_ARGUMENT;
	BEGIN("DeviceGetUUID", d);
	snprintf(out, length, "%s", d->uuid);
	return end(SUCCESS);
}

int nvmlDeviceGetName(struct device *d, char *out, unsigned length)
{
	BEGIN("DeviceGetName", d);
	snprintf(out, length, "%s", d->name);
	return end(SUCCESS);
}

int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci_info *out)
{
	BEGIN("DeviceGetPciInfo", d);
	memset(out, 0, sizeof *out);
	snprintf(out->bus_id, sizeof out->bus_id, "%s", d->bus);
	return end(SUCCESS);
}

int nvmlDeviceGetMinorNumber(struct device *d, unsigned *out)
{
	BEGIN("DeviceGetMinorNumber", d);
	*out = (unsigned)d->minor;
	return end(d->minor < 0 ? NOT_SUPPORTED : SUCCESS);
}

int nvmlDeviceGetMemoryInfo(struct device *d, unsigned long long *total_free_used)
{
	BEGIN("DeviceGetMemoryInfo", d);
	total_free_used[0] = total_free_used[1] = d->memory;
	total_free_used[2] = 0;
	return end(d->memory ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending)
{
	BEGIN("DeviceGetMigMode", d);
	*current = *pending = d->mig > 0;
	return end(d->mig < 0 ? NOT_SUPPORTED : SUCCESS);
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *out)
{
	BEGIN("DeviceGetMaxMigDeviceCount", d);
	*out = 8; /* more than there are: the numbers have holes */
	return end(SUCCESS);
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **out)
{
	BEGIN("DeviceGetMigDeviceHandleByIndex", d);
	unsigned n = 0;
	for (int i = 0; i < device_count; i++)
		if (devices[i].here && devices[i].parent == d && ++n == index) { /* the first has number 1 */
			*out = &devices[i];
			return end(SUCCESS);
		}
	return end(NOT_FOUND);
}

int nvmlDeviceGetGpuInstanceId(struct device *d, unsigned *out)
{
	BEGIN("DeviceGetGpuInstanceId", d);
	*out = (unsigned)d->gi;
	return end(d->parent ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetComputeInstanceId(struct device *d, unsigned *out)
{
	BEGIN("DeviceGetComputeInstanceId", d);
	*out = (unsigned)d->ci;
	return end(d->parent ? SUCCESS : NOT_SUPPORTED);
}

struct attributes { unsigned counts[6], of_gpu, of_compute; unsigned long long megabytes; };

int nvmlDeviceGetAttributes_v2(struct device *d, struct attributes *out)
{
	BEGIN("DeviceGetAttributes", d);
	memset(out, 0, sizeof *out);
	out->of_gpu = (unsigned)d->of_gpu;
	out->of_compute = (unsigned)d->of_compute;
	out->megabytes = d->memory >> 20;
	return end(d->parent ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetNvLinkState(struct device *d, unsigned link, unsigned *out)
{
	BEGIN("DeviceGetNvLinkState", d);
	*out = 1;
	return end((int)link < d->links ? SUCCESS : INVALID_ARGUMENT);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *d, unsigned link, int *out)
{
	BEGIN("DeviceGetNvLinkRemoteDeviceType", d);
	if ((int)link >= d->links)
		return end(INVALID_ARGUMENT);
	*out = strcmp(d->link[link], "switch") ? 0 : 2;
	return end(SUCCESS);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *d, unsigned link, struct pci_info *out)
{
	BEGIN("DeviceGetNvLinkRemotePciInfo", d);
	if ((int)link >= d->links)
		return end(INVALID_ARGUMENT);
	memset(out, 0, sizeof *out);
	snprintf(out->bus_id, sizeof out->bus_id, "%s",
		 strcmp(d->link[link], "switch") ? d->link[link] : "00000000:05:00.0");
	return end(SUCCESS);
}

struct fabric_info { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; };

int nvmlDeviceGetGpuFabricInfoV(struct device *d, struct fabric_info *out)
{
	BEGIN("DeviceGetGpuFabricInfoV", d);
	memcpy(out->cluster, d->cluster, sizeof out->cluster);
	out->status = 0;
	out->clique = d->clique;
	out->state = (unsigned)d->fabric;
	return end(d->fabric ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *out)
{
	(void)type, (void)counter;
	BEGIN("DeviceGetTotalEccErrors", d);
	*out = d->ecc;
	return end(SUCCESS);
}

int nvmlDeviceGetRemappedRows(struct device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
			      unsigned *failed)
{
	BEGIN("DeviceGetRemappedRows", d);
	for (int i = 0; i < device_count; i++)
		if (devices[i].here && devices[i].parent == d)
			return end(NOT_SUPPORTED);
	*corrected = *uncorrected = 0;
	return end(sscanf(d->rows, "%u,%u", pending, failed) == 2 ? SUCCESS : NOT_SUPPORTED);
}

int nvmlDeviceGetRetiredPagesPendingStatus(struct device *d, int *out)
{
	BEGIN("DeviceGetRetiredPagesPendingStatus", d);
	*out = !strcmp(d->rows, "-pending");
	return end(d->rows[0] == '-' ? SUCCESS : NOT_SUPPORTED);
}

struct field_value { unsigned field, scope; long long timestamp, latency; unsigned type; int result; unsigned long long value; };

int nvmlDeviceGetFieldValues(struct device *d, int count, struct field_value *values)
{
	BEGIN("DeviceGetFieldValues", d);
	for (int i = 0; i < count; i++) {
		int known = values[i].field == RECOVERY_FIELD && d->recovery >= 0;
		values[i].result = known ? SUCCESS : NOT_SUPPORTED;
		values[i].value = known ? (unsigned long long)d->recovery : 0;
	}
	return end(SUCCESS);
}

int nvmlDeviceGetCurrentClocksEventReasons(struct device *d, unsigned long long *out)
{
	BEGIN("DeviceGetCurrentClocksEventReasons", d);
	*out = d->hot ? HOT : 0;
	return end(SUCCESS);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *out)
{
	BEGIN("DeviceGetCurrentClocksThrottleReasons", d);
	*out = d->hot ? HOT : 0;
	return end(SUCCESS);
}

int nvmlDeviceValidateInforom(struct device *d)
{
	BEGIN("DeviceValidateInforom", d);
	return end(d->inforom ? CORRUPTED_INFOROM : SUCCESS);
}

int nvmlDeviceGetSupportedEventTypes(struct device *d, unsigned long long *out)
{
	BEGIN("DeviceGetSupportedEventTypes", d);
	*out = XID_EVENT | 2;
	return end(SUCCESS);
}

int nvmlEventSetCreate(struct event_set **out)
{
	BEGIN("EventSetCreate", NULL);
	*out = calloc(1, sizeof **out);
	for (int i = 0; i < event_count; i++)
		if (events[i].number > (*out)->seen)
			(*out)->seen = events[i].number;
	return end(SUCCESS);
}

int nvmlDeviceRegisterEvents(struct device *d, unsigned long long types, struct event_set *set)
{
	(void)types;
	BEGIN("DeviceRegisterEvents", d);
	set->registered[set->count++] = d;
	return end(SUCCESS);
}

int nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned milliseconds)
{
	for (unsigned waited = 0; waited <= milliseconds; waited += 2) {
		BEGIN("EventSetWait", NULL);
		for (int i = 0; i < event_count; i++) {
			struct event *e = &events[i];
			struct device *d = device_of(e->uuid, 0);
			int registered = !d; /* of a GPU that nobody knows */
			for (int j = 0; j < set->count; j++)
				registered |= set->registered[j] == d;
			if (e->number <= set->seen || !registered)
				continue;
			set->seen = e->number;
			out->device = d;
			out->type = XID_EVENT;
			out->data = e->xid;
			out->gi = e->gi;
			out->ci = e->ci;
			return end(SUCCESS);
		}
		end(SUCCESS);
		nap();
	}
	return TIMEOUT;
}

int nvmlEventSetFree(struct event_set *set)
{
	free(set);
	return SUCCESS;
}

const char *nvmlErrorString(int result)
{
	return result == GPU_IS_LOST ? "GPU is lost" : "some error";
}
