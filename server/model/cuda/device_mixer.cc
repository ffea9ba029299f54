#include "server/model/cuda/device_mixer.h"

#include "server/base/status.h"
#include "server/kernels/cuda/causal_conv1d.h"
#include "server/kernels/cuda/flip.h"
#include "server/kernels/cuda/rms_norm.h"
#include "server/kernels/cuda/scan_record.h"
#include "server/kernels/cuda/selective_scan.h"
#include "server/kernels/cuda/ssd_scan.h"

namespace mambascope::model::cuda {
namespace {

namespace device = kernels::cuda;

int64_t ScanOf(const MixerPass& pass, int32_t direction) {
  return int64_t{pass.layer} * pass.config.directions() + direction;
}

// workspace.x = f(conv1d(x_in)), [tokens, conv_channels].
absl::Status Convolve(const MixerPass& pass, int32_t direction, const float* x_in) {
  const BranchWeights& branch = pass.weights.branches[direction];
  device::ConvInputs conv;
  conv.x_in = x_in;
  conv.x_stride = pass.config.in_proj_rows();
  conv.channels = pass.config.conv_channels();
  conv.taps = pass.config.d_conv;
  conv.weight = branch.conv1d;
  conv.bias = branch.conv1d_bias;
  conv.activation = pass.config.conv_activation;
  conv.sequences = pass.pieces.sequences;
  conv.tokens = pass.pieces.tokens;
  conv.seq_start = pass.pieces.seq_start;
  float* const* states = pass.pieces.conv_states + ScanOf(pass, direction) * pass.pieces.sequences;
  return device::CausalConv1d(conv, {pass.workspace.x.data(), states}, pass.workspace.stream.get());
}

float* const* SsmStates(const MixerPass& pass, int32_t direction) {
  return pass.pieces.ssm_states + ScanOf(pass, direction) * pass.pieces.sequences;
}

// y of the scan where traces want it, else null.
float* WantedY(const MixerPass& pass) {
  return pass.record.count > 0 ? pass.workspace.y.data() : nullptr;
}

// What the traces keep of a scan whose inputs and outputs stand in the workspace. Channel d has the
// skip weight D[d / channels_per_skip].
absl::Status Record(const MixerPass& pass, int32_t direction, int64_t channels_per_skip,
                    const device::ScanRecord::Part& first, const device::ScanRecord::Part& second) {
  if (pass.record.count == 0) return absl::OkStatus();
  device::ScanRecord in;
  in.tokens = pass.pieces.traced;
  in.count = pass.record.count;
  in.parts[0] = first;
  in.parts[1] = second;
  in.x = pass.workspace.x.data();
  in.x_stride = pass.config.conv_channels();
  in.y = pass.workspace.y.data();
  in.y_stride = pass.config.d_inner;
  in.D = pass.weights.branches[direction].D;
  in.channels_per_skip = channels_per_skip;
  in.channels = pass.pieces.checked_channels;
  in.checked = pass.record.checked;
  const int64_t scan = ScanOf(pass, direction);
  float* records = pass.workspace.records.data();
  return device::RecordScan(
      in,
      {records + pass.record.selective(scan), records + pass.record.x_checked(scan),
       records + pass.record.y_checked(scan)},
      pass.workspace.stream.get());
}

// One selective scan with its convolution, from xz [tokens, 2 d_inner] to gated [tokens, d_inner].
absl::Status RunBranch(const MixerPass& pass, int32_t direction, const float* xz, float* gated) {
  const ModelConfig& config = pass.config;
  const BranchWeights& branch = pass.weights.branches[direction];
  PassWorkspace& w = pass.workspace;
  const cudaStream_t stream = w.stream.get();
  const int64_t tokens = pass.pieces.tokens, d_inner = config.d_inner, d_state = config.d_state;
  const int64_t dt_rank = config.dt_rank, width = config.selective_width();

  RETURN_IF_ERROR(Convolve(pass, direction, xz));
  RETURN_IF_ERROR(w.gemm.Linear(w.x.data(), d_inner, tokens, branch.x_proj, nullptr,
                                w.selective.data(), width, w.scratch.data(), stream));
  if (config.family == Family::kFalconMamba) {
    const device::RowPart parts[] = {
        {0, dt_rank}, {dt_rank, d_state}, {dt_rank + d_state, d_state}};
    RETURN_IF_ERROR(device::RmsScaleInPlace(w.selective.data(), tokens, width, parts,
                                            config.mixer_rms_eps, stream));
  }
  RETURN_IF_ERROR(w.gemm.Linear(w.selective.data(), width, tokens, branch.dt_proj, nullptr,
                                w.dt.data(), d_inner, w.scratch.data(), stream));

  device::ScanInputs scan;
  scan.d_inner = d_inner;
  scan.d_state = d_state;
  scan.x = w.x.data();
  scan.dt = w.dt.data();
  scan.dt_bias = branch.dt_bias;
  scan.z = xz + d_inner;
  scan.z_stride = 2 * d_inner;
  scan.A = branch.A;
  scan.B = w.selective.data() + dt_rank;
  scan.C = scan.B + d_state;
  scan.bc_stride = width;
  scan.D = branch.D;
  scan.sequences = pass.pieces.sequences;
  scan.seq_start = pass.pieces.seq_start;
  device::ScanOutputs out;
  out.gated = gated;
  out.y = WantedY(pass);
  out.ssm_state = SsmStates(pass, direction);
  RETURN_IF_ERROR(device::SelectiveScan(scan, out, stream));
  return Record(pass, direction, 1, {w.selective.data(), width, width}, {});
}

absl::Status RunBidirectionalMixer(const MixerPass& pass) {
  const int64_t d_inner = pass.config.d_inner, tokens = pass.pieces.tokens;
  const SentPieces& pieces = pass.pieces;
  PassWorkspace& w = pass.workspace;
  const cudaStream_t stream = w.stream.get();
  RETURN_IF_ERROR(RunBranch(pass, 0, w.xz.data(), w.gated.data()));
  RETURN_IF_ERROR(device::FlipRows(w.xz.data(), tokens, 2 * d_inner, pieces.seq_start,
                                   pieces.sequence_of, w.flipped_xz.data(), stream));
  RETURN_IF_ERROR(RunBranch(pass, 1, w.flipped_xz.data(), w.flipped_gated.data()));
  const float scale = pass.config.vision.divide_out ? 0.5f : 1.0f;
  return device::AddFlipped(w.flipped_gated.data(), tokens, d_inner, pieces.seq_start,
                            pieces.sequence_of, scale, w.gated.data(), stream);
}

absl::Status RunHeadedMixer(const MixerPass& pass) {
  const ModelConfig& config = pass.config;
  const BranchWeights& branch = pass.weights.branches[0];
  PassWorkspace& w = pass.workspace;
  const int64_t tokens = pass.pieces.tokens, d_inner = config.d_inner;
  const int64_t states_of_groups = int64_t{config.groups} * config.d_state;
  const float *xbc = w.xz.data() + d_inner, *dt = xbc + config.conv_channels();

  RETURN_IF_ERROR(Convolve(pass, 0, xbc));
  device::SsdInputs scan;
  scan.heads = config.heads;
  scan.head_dim = config.head_dim;
  scan.groups = config.groups;
  scan.d_state = config.d_state;
  scan.x = w.x.data();
  scan.B = scan.x + d_inner;
  scan.C = scan.B + states_of_groups;
  scan.xbc_stride = config.conv_channels();
  scan.dt = dt;
  scan.dt_stride = config.in_proj_rows();
  scan.dt_bias = branch.dt_bias;
  scan.delta_min = config.delta_min;
  scan.delta_max = config.delta_max;
  scan.A = branch.A;
  scan.D = branch.D;
  scan.z = w.xz.data();
  scan.z_stride = config.in_proj_rows();
  scan.sequences = pass.pieces.sequences;
  scan.seq_start = pass.pieces.seq_start;
  device::SsdOutputs out;
  out.gated = w.gated.data();
  out.y = WantedY(pass);
  out.ssm_state = SsmStates(pass, 0);
  RETURN_IF_ERROR(device::SsdScan(scan, out, w.stream.get()));
  RETURN_IF_ERROR(device::GroupRmsNorm(w.gated.data(), pass.weights.mixer_norm, config.norm_eps,
                                       tokens, d_inner, config.groups, w.gated.data(),
                                       w.stream.get()));
  return Record(pass, 0, config.head_dim, {dt, config.in_proj_rows(), config.heads},
                {scan.B, scan.xbc_stride, 2 * states_of_groups});
}

}  // namespace

absl::Status RunMixer(const MixerPass& pass) {
  switch (pass.config.family) {
    case Family::kMamba:
    case Family::kFalconMamba:
      return RunBranch(pass, 0, pass.workspace.xz.data(), pass.workspace.gated.data());
    case Family::kMamba2:
      return RunHeadedMixer(pass);
    case Family::kVim:
      return RunBidirectionalMixer(pass);
  }
  return absl::InternalError("a family without a mixer");
}

}  // namespace mambascope::model::cuda
