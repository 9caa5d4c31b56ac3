#include "cuda/conditional_work.h"

#include <cuda_runtime.h>

#include "cuda/error.cuh"
#include "cuda/launch.cuh"

namespace eaves::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

__global__ void decide(cudaGraphConditionalHandle handle, const std::int64_t* number, std::int64_t least,
                       std::int64_t most) {
  cudaGraphSetConditional(handle, *number >= least && *number <= most ? 1 : 0);
}

/// The end of a stream that is being captured. CUDA 13 gave these functions the names that they had without edges.
struct CaptureEnd {
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t count = 0;
};

CaptureEnd capture_end(const char* op, void* stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  CaptureEnd end;
#if CUDART_VERSION >= 13000
  check_status(
      cudaStreamGetCaptureInfo(as_stream(stream), &status, &id, &end.graph, &end.nodes, &end.edges, &end.count), op);
#else
  check_status(
      cudaStreamGetCaptureInfo_v3(as_stream(stream), &status, &id, &end.graph, &end.nodes, &end.edges, &end.count), op);
#endif
  return end;
}

/// Adds a node that depends on all that the stream has, and that all that follows depends on.
void append(const char* op, void* stream, cudaGraphNodeParams& parameters) {
  const CaptureEnd end = capture_end(op, stream);
  cudaGraphNode_t node = nullptr;
#if CUDART_VERSION >= 13000
  check_status(cudaGraphAddNode(&node, end.graph, end.nodes, end.edges, end.count, &parameters), op);
  check_status(
      cudaStreamUpdateCaptureDependencies(as_stream(stream), &node, nullptr, 1, cudaStreamSetCaptureDependencies), op);
#else
  check_status(cudaGraphAddNode_v2(&node, end.graph, end.nodes, end.edges, end.count, &parameters), op);
  check_status(
      cudaStreamUpdateCaptureDependencies_v2(as_stream(stream), &node, nullptr, 1, cudaStreamSetCaptureDependencies),
      op);
#endif
}

}  // namespace

bool is_being_captured(const char* op, void* stream) {
  cudaStreamCaptureStatus status{};
  check_status(cudaStreamIsCapturing(as_stream(stream), &status), op);
  return status != cudaStreamCaptureStatusNone;
}

ConditionalWork::ConditionalWork(const char* op, void* stream)
    : op_(op), outer_(stream), inner_(nullptr), current_(stream) {
  cudaStream_t inner = nullptr;
  check_status(cudaStreamCreateWithFlags(&inner, cudaStreamNonBlocking), op);
  inner_ = inner;
}

ConditionalWork::~ConditionalWork() { cudaStreamDestroy(as_stream(inner_)); }

void ConditionalWork::run_if(const std::int64_t* number, std::int64_t least, std::int64_t most,
                             const std::function<void()>& work) {
  cudaGraphConditionalHandle handle{};
  check_status(cudaGraphConditionalHandleCreate(&handle, capture_end(op_, outer_).graph, 0, 0), op_);
  launch(op_, decide, {.stream = outer_}, handle, number, least, most);
  cudaGraphNodeParams parameters{};
  parameters.type = cudaGraphNodeTypeConditional;
  parameters.conditional.handle = handle;
  parameters.conditional.type = cudaGraphCondTypeIf;
  parameters.conditional.size = 1;
  append(op_, outer_, parameters);
  check_status(cudaStreamBeginCaptureToGraph(as_stream(inner_), parameters.conditional.phGraph_out[0], nullptr, nullptr,
                                             0, cudaStreamCaptureModeRelaxed),
               op_);
  current_ = inner_;
  cudaGraph_t body = nullptr;
  try {
    work();
  } catch (...) {
    current_ = outer_;
    cudaStreamEndCapture(as_stream(inner_), &body);
    throw;
  }
  current_ = outer_;
  check_status(cudaStreamEndCapture(as_stream(inner_), &body), op_);
}

}  // namespace eaves::cuda
