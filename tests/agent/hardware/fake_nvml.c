/* A libnvidia-ml.so.1 for tests. The file named by FAKE_NVML says what it shows:
 *   first line: what initialisation returns (0: success)
 *   each further line: one GPU as ERROR MINOR MEMORY_BYTES BUS_ID UUID NAME
 * A GPU whose ERROR is not 0 answers everything with it; a MINOR of -1 is not supported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, UNKNOWN = 999 };

struct gpu {
	int error, minor;
	unsigned long long memory;
	char bus_id[32], uuid[96], name[96];
};

struct pci_info {
	char legacy[16];
	unsigned domain, bus, device, pci_device, subsystem;
	char bus_id[32];
};

static struct gpu gpus[16];
static unsigned count;
static int initialised;

static int load(void)
{
	FILE *file = fopen(getenv("FAKE_NVML"), "r");
	int result = UNKNOWN;
	count = 0;
	if (!file)
		return UNKNOWN;
	if (fscanf(file, "%d", &result) != 1)
		result = UNKNOWN;
	struct gpu *g = gpus;
	while (count < 16 && fscanf(file, "%d %d %llu %31s %95s %95[^\n]", &g->error, &g->minor, &g->memory, g->bus_id,
				    g->uuid, g->name) == 6) {
		count++;
		g++;
	}
	fclose(file);
	return result;
}

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	int result = load();
	initialised = result == SUCCESS;
	return result;
}

int nvmlShutdown(void)
{
	if (!initialised)
		return UNINITIALIZED;
	initialised = 0;
	return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
	if (!initialised)
		return UNINITIALIZED;
	*out = count;
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **out)
{
	if (index >= count)
		return INVALID_ARGUMENT;
	*out = &gpus[index];
	return gpus[index].error;
}

int nvmlDeviceGetUUID(struct gpu *g, char *out, unsigned length)
{
	snprintf(out, length, "%s", g->uuid);
	return g->error;
}

int nvmlDeviceGetName(struct gpu *g, char *out, unsigned length)
{
	snprintf(out, length, "%s", g->name);
	return g->error;
}

int nvmlDeviceGetPciInfo_v3(struct gpu *g, struct pci_info *out)
{
	memset(out, 0, sizeof *out);
	snprintf(out->bus_id, sizeof out->bus_id, "%s", g->bus_id);
	return g->error;
}

int nvmlDeviceGetMinorNumber(struct gpu *g, unsigned *out)
{
	if (g->minor < 0)
		return NOT_SUPPORTED;
	*out = (unsigned)g->minor;
	return g->error;
}

int nvmlDeviceGetMemoryInfo(struct gpu *g, unsigned long long *total_free_used)
{
	if (!g->memory)
		return NOT_SUPPORTED;
	total_free_used[0] = g->memory;
	total_free_used[1] = g->memory;
	total_free_used[2] = 0;
	return g->error;
}

const char *nvmlErrorString(int result)
{
	return result == 15 ? "GPU is lost" : "some error";
}
