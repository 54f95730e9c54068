"""A relay that counts what goes over the wire, between a program and an RPC server."""
import socket
import threading


class Wire:
    """Listens at .port and passes everything on to `target`, a port of this machine; .sent and .received are bytes."""

    def __init__(self, target):
        self.target, self.sent, self.received = target, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass_on, args=(client, server, "sent"), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, "received"), daemon=True).start()

    def _pass_on(self, source, sink, count):
        try:
            while data := source.recv(1 << 20):
                setattr(self, count, getattr(self, count) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()
