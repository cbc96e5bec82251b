// Runs a Step in one call: computes its rows, emits the fronts' tokens, and scores rows.
#pragma once

#include "decide.h"

namespace nvium {

template <typename T> class StepRun {
  using F = Front<Accumulator<T>>;

 public:
  StepRun(const Model<T>& model, Call& call) : model_(model), call_(call) {}

  void run() {
    Clock clock;
    double seconds = 0;
    do {
      pass();
      call_.first = 0;
      seconds += clock.lap();
    } while (seconds < call_.seconds && advance_all());
  }

 private:
  // Run the blocks once. Each run emits at most one token, or verifies its drafts.
  void pass() {
    fronts_.clear();
    for (Run* run = call_.runs; run < call_.runs + call_.num_runs; ++run)
      fronts_.emplace_back(*run, call_.seats[run->seat], model_.vocab_size, model_.last());
    Decisions<T> decisions(model_, call_);
    call_.is_tied ? run_tied(decisions) : run_blocks(decisions);
    decisions.emit(fronts_);
    append_emitted();
    score_rows();
  }

  // Run one block after the other.
  void run_blocks(Decisions<T>& decisions) {
    std::vector<const F*> open;
    for (const F& front : fronts_) open.push_back(&front);
    for (int64_t block = call_.first; block < call_.stop; ++block) {
      std::vector<Row> rows;
      for (const F* front : open) add_rows(*front->run, block, rows);
      if (rows.empty()) continue;
      if (block > call_.first && !call_.is_one_pass && static_cast<int64_t>(rows.size()) > call_.max_rows) break;
      forward(rows);
      decisions.route_fronts(block, pass_rows(block));
      if (call_.is_one_pass) continue;
      decisions.emit(fronts_);
      std::erase_if(open, [](const F* front) { return front->has_emitted; });
    }
  }

  // Run all blocks at once, in any order: a block has only rows that have passed the block before in an earlier pass.
  void run_tied(Decisions<T>& decisions) {
    std::vector<Row> rows;
    for (const F& front : fronts_)
      for (int64_t block = 0; block <= model_.last(); ++block) add_rows(*front.run, block, rows);
    if (!rows.empty()) forward(rows);
    for (int64_t block = model_.last(); block >= 0; --block)  // downwards, because stop_of reads the block before
      decisions.route_fronts(block, pass_rows(block));
  }

  // `Run.rows` in nvium_core/engine/schedule/step.py: return the end of the rows of a block.
  int64_t stop_of(const Run& run, int64_t block) const {
    return call_.is_tied && block ? std::min(run.stop, run.filled[block - 1]) : run.stop;
  }

  // After the last block, only rows that draw or are scored are read.
  void add_rows(const Run& run, int64_t block, std::vector<Row>& rows) const {
    const int64_t drawn = std::min(run.first_verified, run.num_tokens - 1);
    const int64_t first_read = block == model_.last() ? std::min(drawn, run.first_scored) : 0;
    for (int64_t t = run.filled[block]; t < stop_of(run, block); ++t)
      rows.push_back({t, &call_.seats[run.seat], block, t >= first_read});
  }

  // Mark the rows of a block as passed, and return the fronts among them.
  std::vector<F*> pass_rows(int64_t block) {
    std::vector<F*> routed;
    for (F& front : fronts_) {
      int64_t& filled = front.run->filled[block];
      const int64_t stop = stop_of(*front.run, block);
      if (front.has_emitted || filled >= stop) continue;
      filled = front.stop = stop;
      if (is_routed(front)) front.block = block, routed.push_back(&front);
    }
    return routed;
  }

  void forward(const std::vector<Row>& rows) {
    Clock clock;
    constexpr int64_t parts = std::is_same_v<T, BFloat16> ? 1 : kTileParts;
    const bool is_tiled = static_cast<int64_t>(rows.size()) >= call_.min_tiled_rows;
    BlockForward<T>(model_, rows, is_tiled ? parts : 0).run();
    const double seconds = clock.lap() / rows.size();
    std::vector<int64_t> counts(model_.num_blocks);
    for (const Row& row : rows) ++counts[row.block];
    for (int64_t block = 0; block < model_.num_blocks; ++block) {
      BlockReport& report = call_.reports[block];
      report.num_passes += counts[block] > 0;
      report.num_rows += counts[block];
      report.seconds += seconds * counts[block];
    }
  }

  // Return whether this block's exit runs for the front. In `original`, it runs if rows await verification. Otherwise it
  // runs unless the front has already exited in this pass.
  static bool is_routed(const F& front) {
    const int64_t rule = front.seat->draw.rule;
    const bool has_exited = (rule == kExits || rule == kThreshold) && !front.pending.empty();
    if (rule == kOriginal) return front.run->first_verified < front.stop;
    return front.stop == front.run->num_tokens && !has_exited;
  }

  void append_emitted() {
    for (const F& front : fronts_) {
      Run& run = *front.run;
      if (run.num_emitted == front.num_emitted_before) continue;
      run.log_reached = 0;
      Seat& seat = call_.seats[run.seat];
      if (seat.draw.rule != kOriginal || run.first_verified + 1 == run.num_tokens)
        seat.append(run.emissions[run.num_emitted - 1].token, run.num_tokens);
    }
  }

  // Advance the runs that have emitted to their next tokens. If a run may not emit another token, or if only a tied pass
  // may leave a front without a token, change no run and return false.
  bool advance_all() {
    for (const F& front : fronts_) {
      const Run& run = *front.run;
      if (run.num_emitted >= run.limit || (call_.is_tied && run.limit == 1)) return false;
      if (run.num_emitted == front.num_emitted_before) {
        if (call_.is_tied) continue;
        return false;
      }
      const int64_t token = run.emissions[run.num_emitted - 1].token;
      if (token == kNoToken || front.seat->stops_at(token)) return false;
    }
    for (const F& front : fronts_) {
      Run& run = *front.run;
      if (run.num_emitted == front.num_emitted_before) continue;
      run.first_verified = run.num_tokens;
      run.stop = ++run.num_tokens;
    }
    return true;
  }

  // Score the rows that have passed the last block in this pass, and emitted rows that are scored at their exits.
  void score_rows() {
    std::vector<ScoredRow> rows;
    for (const F& front : fronts_) {
      Run& run = *front.run;
      const Seat& seat = *front.seat;
      const bool is_due = run.is_scored_at_exit && run.num_emitted;
      const int64_t end = is_due ? run.stop : run.filled[model_.last()];
      for (int64_t row = front.first_scored; row < end; ++row, ++run.num_scored) {
        const int64_t target = std::max(int64_t{0}, seat.tokens[row + 1]);
        const int64_t exit = is_due && row == run.stop - 1 ? run.emissions[0].block : kNotEmitted;
        rows.push_back({seat.slot(row, model_.cache.page_size), target, exit, seat.draw});
      }
    }
    if (!rows.empty()) score(model_, rows, call_.num_top, call_.scores);
  }

  const Model<T>& model_;
  Call& call_;
  std::vector<F> fronts_;  // of all runs, in this pass
};

}  // namespace nvium
