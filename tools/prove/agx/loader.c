// loader FILE THREADS ...: give each SPIR-V file to Mesa's compiler for Apple GPUs, by way of OpenCL.
//
// The kernel of a file is called "k".  It is compiled when it is enqueued; nothing runs, as the device is a
// shim.  Mesa writes a line of numbers, after the line "FILE name" that this program writes.
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_mem memory;

static void fail(const char *what, int error) { fprintf(stderr, "%s: error %d\n", what, error); }

static void compile(const char *name, size_t threads) {
  fprintf(stderr, "\nFILE %s\n", name);
  FILE *file = fopen(name, "rb");
  if (!file) return fail("fopen", 0);
  fseek(file, 0, SEEK_END);
  size_t size = ftell(file);
  rewind(file);
  char *text = malloc(size);
  size = fread(text, 1, size, file);
  fclose(file);

  cl_int error;
  cl_program program = clCreateProgramWithIL(context, text, size, &error);
  if (error) return fail("clCreateProgramWithIL", error);
  if ((error = clBuildProgram(program, 1, &device, "", 0, 0))) return fail("clBuildProgram", error);
  cl_kernel kernel = clCreateKernel(program, "k", &error);
  if (error) return fail("clCreateKernel", error);
  cl_uint arguments = 0;
  clGetKernelInfo(kernel, CL_KERNEL_NUM_ARGS, sizeof arguments, &arguments, 0);
  for (cl_uint i = 0; i < arguments; i++) clSetKernelArg(kernel, i, sizeof memory, &memory);
  size_t grid[3] = {threads, 1, 1};
  if ((error = clEnqueueNDRangeKernel(queue, kernel, 1, 0, grid, grid, 0, 0, 0))) fail("enqueue", error);
  clFlush(queue);
}

int main(int count, char **words) {
  cl_platform_id platform;
  cl_int error;
  if (clGetPlatformIDs(1, &platform, 0) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, 0)) {
    fail("no device", 0);
    return 1;
  }
  context = clCreateContext(0, 1, &device, 0, 0, &error);
  queue = clCreateCommandQueueWithProperties(context, device, 0, &error);
  memory = clCreateBuffer(context, CL_MEM_READ_WRITE, 1 << 20, 0, &error);
  for (int i = 1; i + 1 < count; i += 2) compile(words[i], atoi(words[i + 1]));
  sleep(3);  // Mesa compiles on a thread of its own
  fflush(0);
  _exit(0);  // never waits for a device that is not there
}
