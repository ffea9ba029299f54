#include "server/explain/subject.h"

#include <algorithm>
#include <cmath>

#include "server/kernels/gemm.h"
#include "server/kernels/linear_backward.h"
#include "server/kernels/rms_norm.h"
#include "server/model/sampling.h"

namespace mambascope::explain {
namespace {

// out[m] += weight w[row, m]; `scratch` [w.cols].
void AddRow(kernels::WeightMatrix w, int64_t row, double weight, std::vector<float>& scratch,
            std::vector<double>& out) {
  kernels::WidenRow(w, row, scratch.data());
  for (size_t m = 0; m < out.size(); ++m) out[m] += weight * scratch[m];
}

// The softmax of the head's logits for one normalised row.
std::vector<float> Probabilities(const Subject& subject, const std::vector<float>& row) {
  const model::WeightViews& weights = subject.model->weights().views();
  std::vector<float> logits(weights.head.rows);
  const auto cols = static_cast<int64_t>(row.size());
  const auto outputs = static_cast<int64_t>(logits.size());
  kernels::Linear(*subject.pool, {row.data(), 1, cols, cols}, weights.head, weights.head_bias,
                  {logits.data(), 1, outputs, outputs});
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - largest);
  for (float& logit : logits) {
    logit = static_cast<float>(std::exp(double{logit} - largest) / sum);
  }
  return logits;
}

// df/d(normalised row): the head's rows of target and contrast; of a log-probability less the mean
// of all rows by their probabilities, which a contrast cancels.
std::vector<double> HeadGradient(const Subject& subject, const Output& output,
                                 const std::vector<float>& row) {
  const kernels::WeightMatrix head = subject.model->weights().views().head;
  std::vector<double> gradient(head.cols, 0.0);
  std::vector<float> scratch(head.cols);
  AddRow(head, output.token, 1, scratch, gradient);
  if (output.contrast >= 0) {
    AddRow(head, output.contrast, -1, scratch, gradient);
  } else if (subject.value == v1::OUTPUT_VALUE_LOG_PROBABILITY) {
    const std::vector<float> probabilities = Probabilities(subject, row);
    kernels::LinearTransposed(*subject.pool, {probabilities.data(), 1, head.rows, head.rows}, head,
                              /*accumulate=*/false, {scratch.data(), 1, head.cols, head.cols});
    for (int64_t m = 0; m < head.cols; ++m) gradient[m] -= scratch[m];
  }
  return gradient;
}

// out += weight dRmsNorm^T gradient at the row h.
void AddNormGradient(const float* h, const float* norm, float eps,
                     const std::vector<double>& gradient, double weight, bool frozen, float* out) {
  const size_t cols = gradient.size();
  double squares = 0, along = 0;
  for (size_t m = 0; m < cols; ++m) {
    squares += double{h[m]} * h[m];
    along += gradient[m] * norm[m] * h[m];
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(cols) + eps);
  const double turn = frozen ? 0 : scale * scale * scale * along / static_cast<double>(cols);
  for (size_t m = 0; m < cols; ++m) {
    out[m] += static_cast<float>(weight * (scale * norm[m] * gradient[m] - turn * h[m]));
  }
}

}  // namespace

std::vector<float> RowWeights(const Subject& subject) {
  std::vector<float> weights(subject.tokens, 0);
  if (subject.model->config().mean_pooled()) {
    std::fill(weights.begin(), weights.end(), 1 / static_cast<float>(subject.tokens));
  } else if (subject.outputs.size() <= 1) {
    weights[subject.position] = 1;
  } else {
    for (const Output& output : subject.outputs) {
      weights[output.position] += 1 / static_cast<float>(subject.outputs.size());
    }
  }
  return weights;
}

int64_t ReadTokens(const model::ModelConfig& config, int64_t position, int64_t tokens) {
  return config.family == model::Family::kVim || config.mean_pooled() ? tokens : position + 1;
}

void SeedGradient(const Subject& subject, const float* last_stream, bool frozen_norm, float* out) {
  const model::ModelConfig& config = subject.model->config();
  const float* norm = subject.model->weights().views().norm_f;
  const int64_t d_model = config.d_model, tokens = subject.tokens;
  std::fill_n(out, tokens * d_model, 0.0f);
  std::vector<float> row(d_model);
  if (config.mean_pooled()) {
    Array<float> rows(tokens * d_model);
    kernels::RmsNorm(*subject.pool, last_stream, norm, config.norm_eps, tokens, d_model,
                     rows.data());
    for (int64_t m = 0; m < d_model; ++m) {
      double sum = 0;
      for (int64_t i = 0; i < tokens; ++i) sum += rows[i * d_model + m];
      row[m] = static_cast<float>(sum / static_cast<double>(tokens));
    }
    const auto gradient = HeadGradient(subject, subject.outputs[0], row);
    for (int64_t i = 0; i < tokens; ++i) {
      AddNormGradient(last_stream + i * d_model, norm, config.norm_eps, gradient,
                      1.0 / static_cast<double>(tokens), frozen_norm, out + i * d_model);
    }
    return;
  }
  for (const Output& output : subject.outputs) {
    const float* h = last_stream + output.position * d_model;
    kernels::RmsNorm(*subject.pool, h, norm, config.norm_eps, 1, d_model, row.data());
    AddNormGradient(h, norm, config.norm_eps, HeadGradient(subject, output, row), 1, frozen_norm,
                    out + output.position * d_model);
  }
}

double ValueOf(const Subject& subject, std::span<const float> logits) {
  const size_t width = logits.size() / subject.outputs.size();
  double value = 0;
  for (size_t i = 0; i < subject.outputs.size(); ++i) {
    const std::span<const float> row = logits.subspan(i * width, width);
    const Output& output = subject.outputs[i];
    if (output.contrast >= 0) {
      value += double{row[output.token]} - row[output.contrast];
    } else if (subject.value == v1::OUTPUT_VALUE_LOG_PROBABILITY) {
      value += model::LogProbability(row, output.token);
    } else {
      value += row[output.token];
    }
  }
  return value;
}

}  // namespace mambascope::explain
